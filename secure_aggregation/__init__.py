"""Secure aggregation: the server learns the sum of the clients' vectors, and of each nothing more.

Bonawitz et al. (CCS 2017) over the graph of Bell et al. (CCS 2020), on integers modulo 2^k that
carry the clients' discrete noise (Kairouz et al., arXiv 2102.06387). A round has four exchanges:

    keys      every client makes two X25519 keys for this round alone, and signs them where it can
    shares    it is told its neighbours' keys, and gives each, sealed by AES-GCM, a Shamir share of
              the seed of its own mask and a share of its masking key
    masked    it sends clip -> rotate -> scale -> round -> + noise -> + masks, modulo 2^k: its own
              mask, and one with each neighbour, which the two of them add and subtract
    unmask    it is told which neighbours' vectors have arrived. Of those it gives its share of the
              own mask's seed, of the others its share of the masking key; never both of one client

so that the pairs' masks of those who vanished can be taken away, and the sum of the others is
exact. Without enough shares nothing at all is known, and the round is refused.

Files, from the bottom: `shamir` and `key_agreement` (secrets), `masks` (AES-256-CTR), `graph` (who
is whose neighbour, and how many of them are enough), `quantisation` (from an update to integers and
back), `discrete_gaussian` (the noise, exactly), `accounting` (what the noise of the survivors is
worth), `client` and `server` (the two halves of a round). Nothing here knows of Flower: the halves
take and give plain values, whatever carries them.

What a client checks by itself, whatever the server says: that enough neighbours are there, that no
key is another's or its own, that it masks once, and unmasks once; that at least t of its
neighbourhood have survived, by what it is told (all n' where everybody is everybody's neighbour;
clients do not compare what they are told, and a server that gives them different lists opens the
sum of somewhat fewer); and, where it has a list of its own of the members' public keys, that every
neighbour's keys are signed by the one registered.
With t above two thirds a server that tells one half that a client vanished, and the
other half that it did not, gets neither secret as long as fewer than a third of a neighbourhood
help it. What no client can check: that the others' vectors are bounded, and that they hold their
noise.
"""
