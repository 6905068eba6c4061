import os
import sys

import common
import ray

ray.init()
common.listen()
nodes = [node for node in ray.nodes() if node["Alive"]]
print("nodes", len(nodes), "cpus", int(ray.cluster_resources()["CPU"]), flush=True)


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class Worker:
    def __init__(self, rank: int, world: int) -> None:
        self.points = common.shard(rank, world)

    def gradient(self, w: float, b: float) -> list[float]:
        return common.gradient(w, b, self.points)

    def where(self) -> str:
        return ray.get_runtime_context().get_node_id()


workers = [Worker.remote(rank, 4) for rank in range(4)]
print("spread over", len(set(ray.get([worker.where.remote() for worker in workers]))), flush=True)
w = b = 0.0
for step in range(common.STEPS):
    rows = ray.get([worker.gradient.remote(w, b) for worker in workers])
    by_w, by_b, loss, _ = (sum(column) / 4 for column in zip(*rows, strict=True))
    w, b = w - common.RATE * by_w, b - common.RATE * by_b
    print(f"step {step} loss {loss:.6f}", flush=True)
    if common.MODE == "wait":
        common.time.sleep(0.1)
        if common.heard:
            print("leaving on the early signal", flush=True)
            break
    if common.MODE == "fail" and step == common.FAILING_STEP:
        print("giving up", flush=True)
        sys.exit(17)
print("address", os.environ["RAY_ADDRESS"])
