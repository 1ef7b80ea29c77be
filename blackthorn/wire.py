"""The records of a message between server and clients, and their entries, each named once.

Arrays and metrics have the names of Flower's own strategies, so that its apps understand them.
Behind each name stands who writes it; the other side reads it, and a Byzantine client or the rogue
writes what a client does.
"""

# Records of a message.
ARRAYS = "arrays"  # both: the model's state_dict, of an ArrayRecord
CONFIG = "config"  # server: what follows below; client: its PROBLEM
RULE = "rule"  # server: what the clients do in the round (strategies.local_rule)
LAYOUT = "layout"  # server: what of the arrays is what, by the lists of names below
METRICS = "metrics"  # client: what it says of itself, as client_app.disclosure lets it
MEMORY = "memory"  # server: the vector that it keeps for the client
SECURE = "secure"  # both: what an exchange of secure aggregation tells (strategies.secure_records)
ATTESTED = "attested"  # client: that it carried the rule out

# Entries of the configuration that comes with a round.
SERVER_ROUND = "server-round"  # server
LOCAL_LR = "local-lr"  # server: η_l
ROUNDS_BEGUN = "rounds-begun"  # server: rounds that were asked for, those done again counted
CLIENT_ID = "client-id"  # server: whom it takes the node for; client, enrolling: who it is
SEED = "seed"  # server: that of the streams in blackthorn.randomness
SERIES = "round-series"  # server: of what rounds a message is one, whatever else the run has
NONCE = "nonce"  # server: makes every message's digest one that nobody can foretell
CLAIM = "claim"  # server: "client" where what single clients say of themselves is withheld
SHARE = "share"  # server: the client's share of all examples, for FA-LD
TOTAL_EXAMPLES = "total-examples"  # server: how many all clients have, for FA-LD
SHARED_SEED = "shared-seed"  # server: that of the noise which all clients share, for FA-LD
DIRECTION = "direction"  # server: along which coordinate the curvature is asked for
POISON = "poison"  # simulation: which labels a corrupt client trains on

# Lists of names in LAYOUT. What is in none is the server's, and stays as it is.
PARAMETERS = "parameters"  # server: w, in this order
AVERAGED = "averaged-statistics"  # server: statistics that clients send back
LOCAL = "local-statistics"  # server: statistics that every client keeps for itself

# Entries of the question by which a node enrols.
ASK, ENROL = "ask", "enrol"  # server
SERVER_CODE = "code"  # server: the digest of its code
PROBLEM = "problem"  # client: why it cannot take part

# What a client sends in place of a model.
LIKELIHOOD = "likelihood"  # client: the Gaussian that it fits to its likelihood

# Metrics.
NUM_EXAMPLES = "num-examples"  # client
UPDATE_NORM = "update-norm"  # client: the norm of its update before clipping
SAMPLE_EPSILON = "sample-epsilon"  # client: what one of its examples has spent

# In a round's line of metrics.jsonl: what is called so is no metric of an evaluation.
ROUND_FIELDS = (
    *("round", "local_lr", "invited", "replied", "rejected", "filtered", "over_bound"),
    *("seconds", "evaluated_by", "skipped", "instruments", "catastrophic_failure"),
    *("sample_epsilon", "epsilon_rdp", "rounds_charged", "rounds_of_earlier_runs", "run"),
    *("initial_model", "surplus", "refused", "clip_norm", "noise_norm", "signal_to_noise"),
    *("unevaluated", "warnings"),
)
