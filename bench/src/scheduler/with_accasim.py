"""Simulates a log with AccaSim: EASY backfill on as many nodes of one processor. Arguments: the log, the nodes."""

import collections
import collections.abc
import json
import sys

# It was written before Python 3.10, which has these in one place only.
for name in ("Mapping", "MutableMapping", "Sequence", "Iterable", "Callable"):
    setattr(collections, name, getattr(collections.abc, name))

from accasim.base.allocator_class import FirstFit
from accasim.base.scheduler_class import EASYBackfilling
from accasim.base.simulator_class import Simulator

log, nodes = sys.argv[1], int(sys.argv[2])
with open("accasim-machine.json", "w") as machine:
    json.dump({"groups": {"node": {"core": 1}}, "resources": {"node": nodes}}, machine)
simulator = Simulator(
    log,
    "accasim-machine.json",
    EASYBackfilling(FirstFit()),
    scheduling_output=False,
    pprint_output=False,
    benchmark_output=False,
    statistics_output=False,
    show_statistics=False,
)
simulator.start_simulation()
if simulator.dispatched_jobs != simulator.loaded_jobs or simulator.rejected_jobs or not simulator.loaded_jobs:
    sys.exit(
        f"{simulator.loaded_jobs} jobs were read, {simulator.dispatched_jobs} ran, {simulator.rejected_jobs} were refused"
    )
