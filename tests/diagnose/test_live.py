"""The rank that blocks a running job, in generated jobs of up to thousands of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from dtslurm.diagnose.live import judge, place_of
from dtslurm.diagnose.places import kind_of, short
from dtslurm.model.runs.live import RankLook, StackFrame

SITE = "/home/me/venv/lib/python3.11/site-packages/"
MAIN = [
    StackFrame("train", "/home/me/run/train.py", 120),
    StackFrame("<module>", "/home/me/run/train.py", 200),
]
C10D = SITE + "torch/distributed/distributed_c10d.py"
LOGGER = StackFrame("wrapper", SITE + "torch/distributed/c10d_logger.py", 83)


def stack_frames(*inner: StackFrame, line: int = 120) -> tuple[StackFrame, ...]:
    return (*inner, replace(MAIN[0], line=line), MAIN[1])


COLLECTIVES = {
    "all_reduce": stack_frames(StackFrame("all_reduce", C10D, 3252), LOGGER),
    "barrier": stack_frames(StackFrame("barrier", C10D, 5300), LOGGER, line=130),
    "recv": stack_frames(
        StackFrame("batch_isend_irecv", C10D, 2800),
        StackFrame("_communicate", SITE + "megatron/core/pipeline_parallel/p2p_communication.py", 210),
    ),
    "backward": stack_frames(
        StackFrame("_engine_run_backward", SITE + "torch/autograd/graph.py", 979),
        StackFrame("backward", SITE + "torch/_tensor.py", 623),
    ),
    "synchronize": stack_frames(StackFrame("synchronize", SITE + "torch/cuda/__init__.py", 1050)),
}
INIT = stack_frames(
    StackFrame("_create_c10d_store", SITE + "torch/distributed/rendezvous.py", 190),
    StackFrame("init_process_group", C10D, 1700),
)
LOADS = stack_frames(
    StackFrame("get", "/usr/lib/python3.11/queue.py", 171),
    StackFrame("_try_get_data", SITE + "torch/utils/data/dataloader.py", 1250),
)
SLEEPS = stack_frames(StackFrame("read", "/home/me/run/data/loader.py", 88))
COMPUTES = [
    stack_frames(StackFrame("forward", SITE + "torch/nn/modules/linear.py", 125), line=n)
    for n in range(90, 99)
]

Ranks = list[RankLook]


def rank_look(number: int, frames: tuple[StackFrame, ...] = (), **values: object) -> RankLook:
    look = RankLook(
        rank=number, local_rank=number % 8, host=f"n{number // 8}", pid=1000 + number, state="S", moved=False,
        frames=frames, by="py-spy", silent_s=600.0 + number % 3,
    )  # fmt: skip
    return replace(look, **values)  # type: ignore[arg-type]


def waiting_ranks(world: int, dice: random.Random, kinds: int = 1) -> Ranks:
    """All ranks wait for others; where kinds > 1, in collectives of several groups."""
    chosen = dice.sample(["all_reduce", "barrier", "recv", "backward", "synchronize"], kinds)
    return [rank_look(number, COLLECTIVES[dice.choice(chosen)]) for number in range(world)]


def sleeper(world: int, odd: int, dice: random.Random) -> Ranks:
    ranks = waiting_ranks(world, dice, dice.randint(1, 3))
    ranks[odd] = rank_look(odd, dice.choice([SLEEPS, LOADS]))
    return ranks


def stopped(world: int, odd: int, dice: random.Random) -> Ranks:
    ranks = waiting_ranks(world, dice, dice.randint(1, 2))
    ranks[odd] = rank_look(odd, dice.choice([SLEEPS, COLLECTIVES["all_reduce"], COMPUTES[0], ()]), state="T")
    return ranks


def blocked(world: int, odd: int, dice: random.Random) -> Ranks:
    ranks = waiting_ranks(world, dice)
    waits = "read of /lustre/shard-7 (ll_file_read)"
    ranks[odd] = rank_look(odd, dice.choice([SLEEPS, ()]), state="D", waits=waits)
    return ranks


def gone(world: int, odd: int, dice: random.Random) -> Ranks:
    ranks = waiting_ranks(world, dice, 2)
    ranks[odd] = rank_look(odd, by="none", state="", moved=None)
    return ranks


def ended(world: int, odd: int, dice: random.Random) -> Ranks:
    ranks = waiting_ranks(world, dice)
    ranks[odd] = rank_look(odd, by="", state="", ended=True, exit_code=0, moved=None)
    return ranks


def absent(world: int, odd: int, dice: random.Random) -> Ranks:
    return [rank_look(number, INIT) for number in range(world) if number != odd]


def another_way(world: int, odd: int, dice: random.Random) -> Ranks:
    ranks = [rank_look(number, COLLECTIVES["all_reduce"]) for number in range(world)]
    ranks[odd] = rank_look(odd, COLLECTIVES["barrier"])
    return ranks


def by_proc(world: int, odd: int, dice: random.Random) -> Ranks:
    ranks = [
        rank_look(
            number, by="proc", moved=None, waits=f"recvfrom of socket:[{dice.randrange(9999)}] (sk_wait_data)"
        )
        for number in range(world)
    ]
    ranks[odd] = replace(ranks[odd], waits="nanosleep (hrtimer_nanosleep)")
    return ranks


def spins(world: int, odd: int, dice: random.Random) -> Ranks:
    """GPUs wait for each other while their processes ask them over and over; one is elsewhere."""
    ranks = [rank_look(number, MAIN_LOSS, cpu=1.0, state="R") for number in range(world)]
    ranks[odd] = rank_look(odd, SLEEPS)
    return ranks


MAIN_LOSS = stack_frames(line=141)
HANGS: dict[str, Callable[[int, int, random.Random], Ranks]] = {
    made.__name__: made
    for made in (sleeper, stopped, blocked, gone, ended, absent, another_way, by_proc, spins)
}


@pytest.mark.parametrize("world", [4, 8, 64, 1024, 4096])
@pytest.mark.parametrize("name", HANGS)
def test_the_blocking_rank_is_named_in_every_kind_of_hang(name: str, world: int) -> None:
    for seed in range(3):
        dice = random.Random(f"{name} {world} {seed}")
        odd = dice.randrange(world)
        looks = HANGS[name](world, odd, dice)
        dice.shuffle(looks)
        verdict = judge(looks, world)
        assert (verdict.cause, verdict.rank, verdict.suspects) == ("hang", odd, str(odd)), verdict.summary
        assert verdict.advice
        assert f"rank {odd}" in verdict.summary
        assert sum(place.count for place in verdict.places) == world
        if name != "absent":
            assert (verdict.node, verdict.local_rank) == (f"n{odd // 8}", odd % 8)
        assert (verdict.confidence < 0.7) == (name in ("by_proc", "spins")), "guesses are called so"


def test_a_blocked_node_is_named_by_its_ranks() -> None:
    looks = [rank_look(number, COLLECTIVES["all_reduce"]) for number in range(64)]
    looks[16:24] = [
        rank_look(number, state="D", by="proc", waits="stat (nfs_wait)") for number in range(16, 24)
    ]
    verdict = judge(looks, 64)
    assert (verdict.cause, verdict.rank, verdict.suspects) == ("hang", None, "16-23")
    assert "8 ranks (16-23)" in verdict.summary


@pytest.mark.parametrize("world", [1, 8, 1024])
def test_computing_ranks_are_not_a_hang(world: int) -> None:
    dice = random.Random(world)
    looks = [
        rank_look(n, dice.choice(COMPUTES), cpu=1.0, state="R", moved=True, silent_s=3.0)
        for n in range(world)
    ]
    verdict = judge(looks, world)
    assert (verdict.cause, verdict.rank) == ("none", None)
    assert verdict.confidence >= 0.9


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_ranks_that_reached_a_collective_early_are_not_a_hang(share: float) -> None:
    dice = random.Random(str(share))
    looks = [
        rank_look(n, COLLECTIVES["all_reduce"], silent_s=5.0)
        if n < share * 256
        else rank_look(n, dice.choice(COMPUTES), cpu=1.0, state="R", moved=True, silent_s=5.0)
        for n in range(256)
    ]
    assert judge(looks, 256).cause == "none"


def test_a_rank_that_computes_while_others_wait_is_slow_with_low_confidence() -> None:
    looks = [rank_look(number, COLLECTIVES["all_reduce"]) for number in range(64)]
    looks[5] = rank_look(5, COMPUTES[0], cpu=1.0, state="R", moved=True)
    verdict = judge(looks, 64)
    assert (verdict.cause, verdict.rank) == ("slow", 5)
    assert verdict.confidence < 0.7


def test_a_hang_of_all_ranks_in_one_collective_names_no_rank() -> None:
    verdict = judge([rank_look(number, COLLECTIVES["all_reduce"]) for number in range(64)], 64)
    assert (verdict.cause, verdict.rank) == ("hang", None)
    assert verdict.confidence <= 0.5
    assert "network" in verdict.summary


def test_a_recent_wait_of_all_ranks_is_not_a_hang() -> None:
    assert (
        judge([rank_look(n, COLLECTIVES["all_reduce"], silent_s=2.0) for n in range(64)], 64).cause == "none"
    )


def test_a_sleep_of_all_ranks_in_user_code_is_a_hang_with_low_confidence() -> None:
    verdict = judge([rank_look(number, SLEEPS) for number in range(8)], 8)
    assert (verdict.cause, verdict.rank) == ("hang", None)
    assert verdict.confidence < 0.7
    assert "read (data/loader.py:88)" in verdict.summary


def test_an_early_end_of_one_rank_is_not_a_hang_while_others_compute() -> None:
    looks = [rank_look(n, COMPUTES[0], cpu=1.0, state="R", moved=True, silent_s=1.0) for n in range(8)]
    looks[0] = rank_look(0, by="", ended=True, exit_code=0)
    assert judge(looks, 8).cause == "none"


def test_a_failed_rank_is_named_while_other_ranks_are_still_running() -> None:
    looks = [rank_look(number, SLEEPS) for number in range(8)]
    looks[3] = rank_look(3, by="", state="", ended=True, exit_code=1)
    looks[4] = rank_look(4, by="", state="", ended=True, exit_code=0)
    verdict = judge(looks, 8)
    assert (verdict.cause, verdict.rank) == ("hang", 3)
    assert "dtslurm diagnose without --live" in verdict.advice


EXTENSION = SITE + "torch/utils/cpp_extension.py"
JIT_COMPILE = StackFrame("_jit_compile", EXTENSION, 2400)
LOAD = StackFrame("load", EXTENSION, 1818)
LOCKED = stack_frames(StackFrame("wait", SITE + "torch/utils/file_baton.py", 50), JIT_COMPILE, LOAD)
# DeepSpeed builds an operator while it creates its process group.
LOCKED_IN_DEEPSPEED = stack_frames(
    StackFrame("FileBaton.wait", SITE + "torch/utils/file_baton.py", 50),
    JIT_COMPILE,
    LOAD,
    StackFrame("jit_load", SITE + "deepspeed/ops/op_builder/builder.py", 557),
    StackFrame("build_shm_op", SITE + "deepspeed/comm/torch.py", 20),
    StackFrame("init_distributed", SITE + "deepspeed/comm/comm.py", 803),
)
BUILDS = stack_frames(
    StackFrame("_communicate", "/usr/lib/python3.11/subprocess.py", 2099),
    StackFrame("run", "/usr/lib/python3.11/subprocess.py", 550),
    StackFrame("_run_ninja_build", EXTENSION, 2870),
    StackFrame("_write_ninja_file_and_build_library", EXTENSION, 2500),
    JIT_COMPILE,
    LOAD,
)


@pytest.mark.parametrize("frames", [LOCKED, LOCKED_IN_DEEPSPEED])
@pytest.mark.parametrize("silent_s", [None, 20.0, 600.0])
def test_a_wait_for_the_lock_of_an_extension_is_no_collective(
    frames: tuple[StackFrame, ...], silent_s: float | None
) -> None:
    verdict = judge([rank_look(number, frames, silent_s=silent_s) for number in range(4)], 4)
    assert (verdict.cause, verdict.rank, verdict.suspects) == ("hang", None, "0-3")
    assert (verdict.confidence < 0.7) == (silent_s == 20.0), "a build may just have started"
    assert "wait for the lock of another build of a C++ extension" in verdict.summary
    assert "network" not in verdict.summary
    assert "delete the file lock" in verdict.advice
    assert "TORCH_EXTENSIONS_DIR" in verdict.advice
    [place] = verdict.places
    assert place.kind == "locked"
    assert "wait (torch/utils/file_baton.py:50)" in place.what


def test_a_rank_that_waits_for_the_lock_of_an_extension_blocks_the_others() -> None:
    looks = [rank_look(number, COLLECTIVES["barrier"]) for number in range(8)]
    looks[3] = rank_look(3, LOCKED_IN_DEEPSPEED)
    verdict = judge(looks, 8)
    assert (verdict.cause, verdict.rank, verdict.suspects) == ("hang", 3, "3")
    assert verdict.summary.startswith("rank 3 waits for the lock of another build of a C++ extension")
    assert "7 ranks (0-2,4-7) wait in barrier" in verdict.summary


def test_an_unseen_rank_may_hold_the_lock_of_an_extension() -> None:
    looks = [rank_look(number, LOCKED) for number in range(4)]
    looks[0] = rank_look(0, by="", state="", moved=None)
    verdict = judge(looks, 4)
    assert (verdict.cause, verdict.suspects) == ("hang", "1-3")
    assert verdict.confidence < 0.7


@pytest.mark.parametrize("others", [LOCKED, COLLECTIVES["barrier"], SLEEPS])
def test_a_rank_that_builds_an_extension_is_not_a_hang(others: tuple[StackFrame, ...]) -> None:
    looks = [rank_look(number, others) for number in range(4)]
    looks[0] = rank_look(0, BUILDS)
    verdict = judge(looks, 4)
    assert (verdict.cause, verdict.rank) == ("none", None)
    assert "rank 0 is building a C++ extension" in verdict.summary


def test_a_stopped_rank_is_named_although_another_rank_builds_an_extension() -> None:
    looks = [rank_look(0, BUILDS), rank_look(1, LOCKED), rank_look(2, LOCKED), rank_look(3, state="T")]
    assert (judge(looks, 4).cause, judge(looks, 4).rank) == ("hang", 3)


def test_ranks_that_compute_are_not_delayed_by_the_lock_of_an_extension() -> None:
    looks = [rank_look(n, COMPUTES[0], cpu=1.0, state="R", moved=True, silent_s=1.0) for n in range(4)]
    looks[2] = rank_look(2, LOCKED)
    assert judge(looks, 4).cause == "none"


def test_ranks_that_were_not_examined_give_an_unknown_cause() -> None:
    looks = [rank_look(number, by="", state="", moved=None) for number in range(8)]
    verdict = judge(looks, 8)
    assert (verdict.cause, verdict.rank) == ("unknown", None)


def test_stack_locations_are_shortened() -> None:
    assert short(C10D) == "torch/distributed/distributed_c10d.py"
    assert short("/usr/lib/python3.11/queue.py") == "queue.py"
    assert short("/home/me/run/train.py") == "run/train.py"
    assert kind_of(rank_look(0, LOADS)) == "data"
    [place] = judge([rank_look(0, SLEEPS)], 1).places
    assert place.what == "sleeping in read (data/loader.py:88)"
    [place] = judge([rank_look(0, LOADS)], 1).places
    assert place.what == "waiting for its data, in get (queue.py:171), called by train (run/train.py:120)"


@pytest.mark.parametrize(
    ("state", "waits", "text"),
    [
        ("S", "futex (futex_wait_queue)", "waiting for a lock"),
        ("S", "nanosleep (hrtimer_nanosleep)", "sleeping"),
        ("S", "", "sleeping"),
        (
            "D",
            "read of /data/x (folio_wait_bit)",
            "waiting for a device or file system: reading from /data/x",
        ),
        ("D", "", "waiting for a device or file system"),
    ],
)
def test_the_wait_of_a_rank_without_a_stack_is_described_in_words(state: str, waits: str, text: str) -> None:
    look = rank_look(0, state=state, by="proc", moved=None, waits=waits)
    assert place_of(look) == text
