"""A small gRPC service by which the corrupt clients of a round share their honest updates.

The service (`python -m blackthorn.attacks.collusion`) runs beside the Byzantine nodes and knows
how many colluders there are. `Accomplices` is what a Byzantine ClientApp sees of it.
`collusion_pb2` is made from `collusion.proto` by grpcio-tools.
"""

from .client import Accomplices, CollusionFailed
from .rendezvous import Rendezvous
from .service import CollusionServer

__all__ = ["Accomplices", "CollusionFailed", "CollusionServer", "Rendezvous"]
