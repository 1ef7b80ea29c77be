"""Secure aggregation: the server learns the sum of the clients' vectors, and of each nothing more.

Bonawitz et al. (CCS 2017) over the graph of Bell et al. (CCS 2020), on integers modulo 2^k that
carry the clients' discrete noise (Kairouz et al., arXiv 2102.06387). A round has five exchanges:

    keys      every client makes two X25519 keys for this round alone, and signs them where it can
    shares    it is told its neighbours' keys, and gives each, sealed by AES-GCM, a Shamir share of
              the seed of its own mask and a share of its masking key
    masked    it sends clip -> rotate -> scale -> round -> + noise -> + masks, modulo 2^k: its own
              mask, and one with each neighbour, which the two of them add and subtract
    consistency
              it is told whose vectors have arrived, once, and seals the digest of that list for
              each neighbour on it
    unmask    it is told what its neighbours have sealed for it. Where enough were told the same
              list, it gives of those on it its share of the own mask's seed, of the others its
              share of the masking key; never both of one client

so that the pairs' masks of those who vanished can be taken away, and the sum of the others is
exact. Without enough shares nothing at all is known, and the round is refused.

Files, from the bottom: `shamir` and `key_agreement` (secrets), `masks` (AES-256-CTR), `graph` (who
is whose neighbour, and how many of them are enough), `quantisation` (from an update to integers and
back), `discrete_gaussian` (the noise, exactly), `accounting` (what the noise of the survivors is
worth), `client` and `server` (the two halves of a round). Nothing here knows of Flower: the halves
take and give plain values, whatever carries them.

What a client checks by itself, whatever the server says: that enough neighbours are there, that no
key is another's or its own, that it masks once, and unmasks once; that n' of all and t of its
neighbourhood have survived, by the list that it is told, and that t of its neighbourhood were told
that very list, by what they have sealed for it; and, where it has a list of its own of the members'
public keys, that every neighbour's keys are signed by the one registered.

Where everybody is everybody's neighbour a server that tells different lists has one of them at most
agreed on as long as m < 2t - n clients help it, by sealing both: of the n - m others t - m have to
be told each. Then one sum alone opens, of all that are on that list, n' at least: nobody else gives
a share that opens a mask between two of them, and whoever seals the list has masked with all that
are on it. Those are t - m at least, which is more than n - n': so the others cannot have been told
to mask among n' without them, and have no sum of their own. Beyond, who is whose neighbour is the
server's word, and no such number is claimed. What no client can check: that the others' vectors are
bounded, and that they hold their noise.
"""
