"""A first job: all ranks connect to rank 0 over the network, as the ranks of a training do.

The ranks need the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and no package.
"""

import os
import socket
import sys
import time

PATIENCE_S = 60.0  # until all ranks have started


def find_node_name() -> str:
    """Return the name of this node as Slurm knows it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def describe_rank(rank: int) -> str:
    """Return the line that rank 0 prints about a rank."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("ROCR_VISIBLE_DEVICES") or "none"
    return "rank {} runs on {}, GPUs: {}".format(rank, find_node_name(), gpus)


def receive_lines(port: int, count: int) -> "list[str]":
    """Return the lines of the other ranks, and confirm each line to its rank.

    Raises:
        OSError: a rank did not connect in time.
    """
    lines = []
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen(count)
        server.settimeout(PATIENCE_S)
        for _ in range(count):
            connection, _address = server.accept()
            with connection, connection.makefile("rw") as stream:
                connection.settimeout(PATIENCE_S)
                lines.append(stream.readline().rstrip("\n"))
                stream.write("received\n")
    return lines


def send_line(host: str, port: int, line: str) -> None:
    """Send this rank's line to rank 0, which may start later.

    Raises:
        OSError: rank 0 cannot be reached, or has ended.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=PATIENCE_S)
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
    with connection, connection.makefile("rw") as stream:
        stream.write(line + "\n")
        stream.flush()
        if not stream.readline():
            raise ConnectionError("rank 0 closed the connection")


def main() -> None:
    """Print a line about each rank in rank 0, or end with an error in the rank that cannot connect."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        if rank:
            send_line(host, port, describe_rank(rank))
            return
        lines = receive_lines(port, size - 1)
    except OSError as error:
        sys.exit("rank {} on {} has no connection by {}:{}: {}".format(
            rank, find_node_name(), host, port, error))  # fmt: skip
    for line in [describe_rank(0), *sorted(lines, key=lambda text: int(text.split()[1]))]:
        print(line)
    print("all {} ranks are connected".format(size), flush=True)


if __name__ == "__main__":
    main()
