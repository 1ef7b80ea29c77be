"""What stands between the internet and Flower's servicers, in the SuperLink's own process.

`superlink.py` starts Flower's SuperLink with it. A request passes, from the outside in,

    connections.py   how many connections an address and a key may hold, and for how long
    gate.py          whose request it is, how many are under way, and whether it arrives in time
    checks.py        whether what it asks is the node's own, and no more than its message needs

and what is refused is written down (`records.py`) and told to the run and to operators
(`service.py`). What an operator may have to change is a setting with a default and a reason
(`limits.py`); docs/security.md names the other numbers too. Whatever relies on parts of Flower that
it does not promise is in `flower.py`. `renewal.py` renews the certificate while it is served.
"""

# The call with which a ServerApp asks who the keys are, and what was refused.
REPORT = "/blackthorn.Guard/Report"
