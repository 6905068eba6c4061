import common
import horovod.torch as hvd
import torch

hvd.init()
common.listen()
print("mpi", hvd.mpi_enabled(), "gloo", hvd.gloo_enabled(), "local", hvd.local_rank(), hvd.local_size())
print("cross", hvd.cross_rank(), hvd.cross_size())


def mean(numbers: list[float]) -> list[float]:
    return hvd.allreduce(torch.tensor(numbers, dtype=torch.float64), name="numbers").tolist()


common.fit(hvd.rank(), hvd.size(), mean)
hvd.shutdown()
