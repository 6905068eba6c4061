import os

import common
from mpi4py import MPI

comm = MPI.COMM_WORLD
assert comm.rank == int(os.environ["RANK"])
common.listen()
common.fit(comm.rank, comm.size, lambda numbers: [comm.allreduce(n) / comm.size for n in numbers])
