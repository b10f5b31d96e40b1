"""What requests of an engine are told: salts, handles, deadlines, refusals; no engine is needed."""

import json
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from mappers.identity import IdentityClaim
from service.memfd import allocate
from service.schemas import Receipt
from service.vllm.counters import Counters
from service.vllm.engine import Geometry
from service.vllm.errors import NotLoaded
from service.vllm.exports import Exports
from service.vllm.hang import HangWatch
from service.vllm.link import Leased
from service.vllm.loads import Loads
from service.vllm.params import Answered, Handle, Params, allows, hops_of, read_params, salt
from service.vllm.scheduler import SchedulerSide
from service.vllm.seal import Sealed, common_tokens, is_of
from service.vllm.translating import Ready

MAPPER, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
CLAIM = IdentityClaim(model="m", version="1", dtype="float32", rope_theta=10_000.0)
BLOCK, PROMPT = 4, list(range(20))
GEOMETRY = Geometry(
    layers=2, kv_heads=2, head_dim=8, block_tokens=BLOCK, ranks=1, item_bytes=4, max_tokens=64
)
HANDLE = Handle(
    buffer="0" * 32, nbytes=1000, tokens=20, seal_offset=0, ranks=1, hops=1, source=CLAIM
)
LEASE = f"{1:032x}"
PARAMS, EXPORT = Params(handle=HANDLE, mapper=MAPPER), Params(export=True)


def receipt(tokens: int) -> Receipt:
    """Of a translation of the first ``tokens``."""
    return Receipt(
        kl_bound=0.1, max_kl=0.2, risk="exceedance", alpha=0.1, delta=0.05, kl_clip=1.0, rows=60,
        unproven=False, mapper="m", digest=MAPPER, tokens=tokens, start_position=0,
        native_tail=20 - tokens, prefix_tokens=0, layout="NHD", block_tokens=None,
        dtype="float32", guarantee="", token_ids_sha256=None,
    )  # fmt: skip


class Later(Executor):
    """Runs nothing until it is told to, in order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Any]] = []

    def submit(self, work: Any, /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: work(*given, **named)))
        return future

    def run(self, most: int = 1000) -> None:
        """What has been submitted, and what that submits."""
        while self.waiting and most:
            most -= 1
            future, work = self.waiting.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except NotLoaded as error:
                future.set_exception(error)


@dataclass
class World:
    """A service that answers as it is told, and a clock."""

    ready_tokens: int = 17
    common: int = 20
    refusal: NotLoaded | None = None
    now: float = 0.0
    released: list[str] = field(default_factory=list)
    later: Later = field(default_factory=Later)
    counters: Counters = field(default_factory=Counters)
    leases: int = 0
    while_asked: Callable[[], None] = lambda: None
    mapped: weakref.WeakSet[Leased] = field(default_factory=weakref.WeakSet)

    def lease(self, nbytes: int) -> Leased:
        self.while_asked()
        if self.refusal is not None:
            raise self.refusal
        self.leases += 1
        leased = Leased(f"{self.leases:032x}", allocate(nbytes))
        self.mapped.add(leased)
        return leased

    def release(self, leased: Leased) -> None:
        leased.close()
        self.end(leased.id)

    def end(self, lease_id: str) -> None:
        self.released.append(lease_id)

    def translate(self, params: Params, prompt: list[int], until_seconds: float) -> Ready:
        return Ready(self.lease(4096), receipt(self.ready_tokens), self.common)

    def loads(self) -> Loads:
        return Loads(
            self.translate, self.release, self.later, self.counters,
            block_tokens=BLOCK, deadline_seconds=5.0, clock=lambda: self.now,
        )  # fmt: skip

    def exports(self) -> Exports:
        return Exports(
            CLAIM, GEOMETRY, self, self.later, self.counters,  # type: ignore[arg-type]
            lease_seconds=1.0, clock=lambda: self.now,
        )  # fmt: skip

    def counted(self) -> dict[str, int]:
        return {kind: requests for kind, (requests, _) in self.counters.take().items()}


@pytest.fixture
def world() -> World:
    return World()


def begun(world: World, **params: Any) -> Loads:
    loads = world.loads()
    loads.begin("r", PARAMS.model_copy(update=params), PROMPT, salt(MAPPER, 2, "s"))
    return loads


@pytest.mark.parametrize(
    ("ready", "common", "computed", "expected"),
    [
        (17, 20, 0, 16),
        (16, 20, 0, 16),
        (15, 20, 0, 12),
        (17, 9, 0, 8),  # another turn than the cache's
        (20, 20, 0, 16),  # at least one token is read natively
        (17, 20, 8, 8),  # what is in the engine's own cache under this salt
        (17, 20, 16, 0),
        (3, 20, 0, 0),
    ],
)
def test_whole_blocks_of_what_is_translated_and_of_this_prompt(
    world: World, ready: int, common: int, computed: int, expected: int
) -> None:
    world.ready_tokens, world.common = ready, common
    loads = begun(world)
    assert loads.matched("r", computed) is None
    world.later.run()
    assert loads.matched("r", computed) == expected


@pytest.mark.parametrize(
    ("prompt", "tail", "expected"), [(10, 3, 4), (11, 3, 8), (10, 1, 8), (4, 1, 0), (2, 5, 0)]
)
def test_the_end_of_a_prompt_that_is_shorter_than_the_cache_is_read_natively(
    world: World, prompt: int, tail: int, expected: int
) -> None:
    world.ready_tokens, world.common = 20 - tail, prompt
    loads = world.loads()
    loads.begin("r", PARAMS, PROMPT[:prompt], salt(MAPPER, 2, "s"))
    world.later.run()
    assert loads.matched("r", 0) == expected


def test_a_load_from_promise_to_release(world: World) -> None:
    loads = begun(world)
    world.later.run()
    assert loads.matched("r", 4) == 12
    assert loads.matched("r", 4) == 12  # the engine had no blocks
    loads.allocated("r", [7, 5, 3, 9, 11], 12)
    loads.allocated("r", [7, 5, 3, 9, 11], 0)
    (job,) = loads.jobs()
    assert (job.blocks, job.first_token, job.tokens) == ((5, 3, 9), 4, 17)
    assert loads.jobs() == []
    assert world.released == []
    loads.done({"r"}, set())
    world.later.run()
    assert world.released == [LEASE]
    assert not world.mapped
    assert loads.matched("r", 0) == 0  # preempted: computed again
    said = loads.forget("r")
    assert said is not None
    assert said.model_dump()["tokens"] == 12
    answered = json.dumps(Answered(loaded=said).model_dump(mode="json"))  # type: ignore[arg-type]
    assert Answered.model_validate(json.loads(answered), strict=False).loaded == said
    assert world.counted() == {"load loaded": 1}


@pytest.mark.parametrize("reason", ["breaker_open", "unreachable", "identity_mismatch"])
def test_any_other_answer_is_a_prefill(world: World, reason: str) -> None:
    world.refusal = NotLoaded(reason)
    loads = begun(world)
    world.later.run()
    assert loads.matched("r", 0) == 0
    assert loads.matched("r", 0) == 0
    assert loads.forget("r") is not None
    assert world.counted() == {f"load {reason}": 1}


def test_the_deadline_ends_the_waiting_and_what_comes_later_is_released(world: World) -> None:
    loads = begun(world, deadline_seconds=2.0)
    world.now = 1.9
    assert loads.matched("r", 0) is None
    world.now = 2.0
    assert loads.matched("r", 0) == 0
    world.later.run()
    assert world.released == [LEASE]  # while the request goes on
    assert not world.mapped
    assert loads.matched("r", 0) == 0
    loads.forget("r")
    world.later.run()
    assert world.released == [LEASE]
    assert world.counted() == {"load deadline": 1}


def test_what_is_too_little_to_load_is_released_at_once(world: World) -> None:
    world.ready_tokens = 3
    loads = begun(world)
    world.later.run()
    assert loads.matched("r", 0) == 0
    world.later.run()
    assert world.released == [LEASE]
    assert not world.mapped
    assert world.counted() == {"load nothing_to_load": 1}


def test_a_load_that_failed_is_computed(world: World) -> None:
    loads = begun(world)
    world.later.run()
    loads.allocated("r", [1, 2, 3, 4, 5], loads.matched("r", 0) or 0)
    loads.done({"r"}, {"r"})
    assert loads.matched("r", 0) == 0
    assert world.counted() == {"load load_failed": 1}


def test_an_aborted_request_keeps_its_memory_until_the_copy_has_ended(world: World) -> None:
    loads = begun(world)
    world.later.run()
    loads.allocated("r", [1, 2, 3, 4, 5], loads.matched("r", 0) or 0)
    loads.forget("r")
    world.later.run()
    assert world.released == []
    loads.done({"r"}, set())
    world.later.run()
    assert world.released == [LEASE]


@pytest.mark.parametrize(
    "given",
    [
        None,
        "mine",
        salt(OTHER, 2),
        salt(MAPPER, 2) + "0",
        f"x{salt(MAPPER, 2)}",
        MAPPER,
        salt(MAPPER, 1),
        salt(MAPPER, 3, "s"),
        f"kvt-{MAPPER}",
        f"kvt-{MAPPER}-s",
    ],  # fmt: skip
)
def test_without_a_salt_that_names_the_mapper_nothing_is_loaded(
    world: World, given: str | None
) -> None:
    loads = world.loads()
    loads.begin("r", PARAMS, PROMPT, given)
    assert world.later.waiting == []
    assert loads.matched("r", 0) == 0
    assert world.counted() == {"load no_salt": 1}


def test_salts() -> None:
    assert allows(salt(MAPPER, 1), MAPPER, 1)
    assert allows(salt(MAPPER, 1, "s"), MAPPER, 1)
    assert not allows(salt(MAPPER, 1), None, 1)
    assert not allows(salt(MAPPER, 1), MAPPER, 2)
    for other, hops in ((None, 0), ("mine", 0), (f"kvt-{MAPPER}-7x", None), ("kvt-x", None)):
        assert hops_of(other) == hops
    assert [hops_of(salt(OTHER, n, "3-s")) for n in (1, 64, 65)] == [1, 64, None]
    assert len(salt(MAPPER, 64, "s" * 32)) <= 128  # vLLM's limit


def test_an_export_from_arrival_to_handle(world: World) -> None:
    exports = world.exports()
    exports.begin("r", EXPORT, 24, 0)
    world.later.run()
    ids = list(range(50, 60))
    handle = exports.finish("r", ids, [4, 2, 6, 8], whole=True)
    assert handle is not None
    assert (handle.tokens, handle.hops, handle.source) == (10, 0, CLAIM)
    (job,) = exports.jobs()
    assert job.blocks == (4, 2, 6)
    memory = job.memory.open().data
    assert is_of(memory, handle.seal_offset, Sealed(CLAIM, 10, ranks=1, hops=0))
    assert common_tokens(memory, handle.seal_offset, 10, ids) == 10
    exports.done({"r"})
    del memory
    assert not world.mapped
    with pytest.raises(FileNotFoundError):
        job.memory.open()
    assert world.counted() == {"export exported": 1}


def test_an_export_has_no_more_than_there_is_room_for(world: World) -> None:
    exports = world.exports()
    exports.begin("r", EXPORT, 6, 0)
    world.later.run()
    handle = exports.finish("r", list(range(10)), [4, 2, 6], whole=True)
    assert handle is not None
    assert handle.tokens == 6
    assert exports.jobs()[0].blocks == (4, 2)


def test_no_lease_no_handle(world: World) -> None:
    world.refusal = NotLoaded("buffer_budget")
    exports = world.exports()
    exports.begin("refused", EXPORT, 6, 0)
    world.later.run()
    exports.begin("late", EXPORT, 6, 0)
    world.refusal = None
    assert exports.finish("refused", [1, 2], [4], whole=True) is None
    assert exports.finish("never asked", [1, 2], [4], whole=True) is None
    late = []
    world.while_asked = lambda: late.append(exports.finish("late", [1, 2], [4], whole=True))
    world.later.run()
    assert late == [None]
    assert exports.jobs() == []
    assert world.released == [LEASE]
    assert world.counted() == {"export buffer_budget": 1, "export lease_too_late": 1}


def test_the_lease_that_an_export_replaces_goes_first(world: World) -> None:
    scheduler = side(world)
    scheduler.new(request({"kvt": {"export": True, "replaces": "9" * 32}}))
    world.later.run()
    assert world.released == ["9" * 32]
    assert world.leases == 1


def test_a_request_is_held_back_for_its_lease_but_not_for_long(world: World) -> None:
    scheduler = side(world)
    quick, slow = (request({"kvt": {"export": True}}, request_id=name) for name in ("q", "s"))
    scheduler.new(quick)
    assert scheduler.matched(quick, 0) == (None, False)
    world.later.run()
    assert scheduler.matched(quick, 0) == (0, False)
    scheduler.new(slow)
    assert scheduler.matched(slow, 0) == (None, False)
    urgent = request({"kvt": {"export": True, "deadline_seconds": 0.5}}, request_id="u")
    scheduler.new(urgent)
    world.now = 0.5
    assert scheduler.matched(slow, 0) == (None, False)
    assert scheduler.matched(urgent, 0) == (0, False)
    world.now = 1.0
    assert scheduler.matched(slow, 0) == (0, False)
    assert scheduler.finished(slow, [1], whole=True) == (False, None)


def test_many_at_once_all_get_their_leases_however_long_the_last_waits(world: World) -> None:
    def slow() -> None:
        world.now += 0.2

    world.while_asked = slow
    exports, names = world.exports(), [str(number) for number in range(16)]
    for name in names:
        exports.begin(name, EXPORT, 6, 0)
    assert all(exports.holds_back(name) for name in names)
    world.later.run(8)
    assert not any(exports.holds_back(name) for name in names)  # their second is over
    exports.begin("newcomer", EXPORT, 6, 0)
    assert exports.holds_back("newcomer")
    world.later.run()
    handles = [exports.finish(name, [1, 2], [4], whole=True) for name in (*names, "newcomer")]
    assert None not in handles
    assert world.counted() == {"export exported": 17}


def test_a_service_that_hangs_costs_its_second_once(world: World) -> None:
    exports, held = world.exports(), dict[str, bool]()

    def hanging() -> None:
        world.now = 0.5
        exports.begin("during", EXPORT, 6, 0)
        held["before it is known"] = exports.holds_back("during")
        world.now = 1.0
        held["after"] = exports.holds_back("during")
        exports.begin("later", EXPORT, 6, 0)
        held["later"] = exports.holds_back("later")
        world.now = 5.0
        raise NotLoaded("unreachable")

    world.while_asked = hanging
    exports.begin("first", EXPORT, 6, 0)
    world.later.run(1)
    assert held == {"before it is known": True, "after": False, "later": False}
    assert world.counted() == {"export service_hangs": 1}
    exports.begin("asked again", EXPORT, 6, 0)
    assert not exports.holds_back("asked again")
    world.while_asked = lambda: None
    world.later.run()
    assert exports.finish("asked again", [1, 2], [4], whole=True) is not None
    exports.begin("well again", EXPORT, 6, 0)
    assert exports.holds_back("well again")


def test_one_question_that_is_stuck_does_not_make_the_service_hang() -> None:
    now = [0.0]
    watch = HangWatch(1.0, lambda: now[0])
    with watch.question():
        now[0] = 2.0
        assert watch.hangs()
        with watch.question():
            pass
        assert not watch.hangs()
        now[0] = 3.0
        assert not watch.hangs()
    assert not watch.hangs()
    with watch.question():
        now[0] = 4.0
        assert watch.hangs()
    assert watch.hangs()


def test_leases_that_nobody_waits_for_are_not_asked_for(world: World) -> None:
    exports = world.exports()
    for name in ("first", "second"):
        exports.begin(name, EXPORT, 6, 0)
    world.later.run(1)
    for name in ("first", "second"):
        exports.finish(name, [1, 2], [4], whole=name == "first")
    world.later.run()
    assert world.leases == 1


def test_an_aborted_request_gives_its_lease_back(world: World) -> None:
    exports = world.exports()
    exports.begin("r", EXPORT, 6, 0)
    world.later.run()
    assert exports.finish("r", [1, 2], [4], whole=False) is None
    world.later.run()
    assert world.released == [LEASE]


def request(params: object, **changes: Any) -> Any:
    """vLLM's Request, as far as it is read."""
    fields = {
        "request_id": "r", "prompt_token_ids": PROMPT, "lora_request": None, "mm_features": [],
        "max_tokens": 4, "cache_salt": None, "kv_transfer_params": params, "num_tokens": 24,
        "num_computed_tokens": 23, "all_token_ids": list(range(24)),
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def side(world: World) -> SchedulerSide:
    return SchedulerSide(world.exports(), world.loads(), answer_tokens=1024)


HOSTILE = [
    None, [], "kvt", {}, {"kvt": None}, {"kvt": []}, {"kvt": {"export": "yes"}},
    {"kvt": {"handle": {}}}, {"kvt": {"unknown": 1}}, {"kvt": {"export": True, "max_kl": "NaN"}},
    {"kvt": {"deadline_seconds": -1}}, {"kvt": {"deadline_seconds": float("nan")}},
    {"kvt": {"handle": HANDLE.model_dump() | {"buffer": "../../x"}}},
    {"kvt": {"handle": HANDLE.model_dump() | {"tokens": 1 << 62}}}, {"kvt": {"mapper": b"x"}},
]  # fmt: skip


@pytest.mark.parametrize("params", HOSTILE)
def test_what_is_not_understood_is_as_nothing(world: World, params: object) -> None:
    scheduler = side(world)
    asked = request(params, cache_salt=salt(MAPPER, 2))
    scheduler.new(asked)
    assert scheduler.matched(asked, 0) == (0, False)
    assert scheduler.finished(asked, [1, 2], whole=True) == (False, None)
    assert world.later.waiting == []


@pytest.mark.parametrize(
    "changes", [{"lora_request": "l"}, {"mm_features": ["image"]}, {"prompt_token_ids": None}]
)
def test_requests_whose_kv_is_not_of_their_tokens_alone(world: World, changes: Any) -> None:
    scheduler = side(world)
    asked = request({"kvt": PARAMS.model_dump(mode="json") | {"export": True}}, **changes)
    scheduler.new(asked)
    assert scheduler.matched(asked, 0) == (0, False)
    assert world.later.waiting == []


@pytest.mark.parametrize(
    ("cache_salt", "handed", "hops"),
    [
        (None, False, 0),
        ("mine", True, 0),
        (salt(MAPPER, 2), True, 2),
        (salt(MAPPER, 3), False, 3),
        (f"kvt-{MAPPER}", True, None),
    ],
)
def test_hops_are_counted_and_kv_of_unknown_ones_is_not_exported(
    world: World, cache_salt: str | None, handed: bool, hops: int | None
) -> None:
    scheduler = side(world)
    said = PARAMS.model_dump(mode="json") if handed else {}
    asked = request({"kvt": {**said, "export": True}}, cache_salt=cache_salt)
    scheduler.new(asked)
    world.later.run()
    waits, answered = scheduler.finished(asked, list(range(6)), whole=True)
    assert waits is (hops is not None)
    handle = answered["kvt"]["handle"] if answered and waits else None
    assert (handle and handle["hops"]) == hops
    assert handle is None or handle["tokens"] == 23


def test_kv_of_too_many_hops_is_not_exported(world: World) -> None:
    scheduler = side(world)
    handle = HANDLE.model_copy(update={"hops": 64})
    said = Params(handle=handle, mapper=MAPPER, export=True).model_dump(mode="json")
    asked = request({"kvt": said}, cache_salt=salt(MAPPER, 65))
    scheduler.new(asked)
    world.later.run()
    assert scheduler.finished(asked, list(range(6)), whole=True)[0] is False


def test_what_an_engine_answers_is_what_another_reads(world: World) -> None:
    scheduler = side(world)
    asked = request({"kvt": {"export": True}})
    scheduler.new(asked)
    world.later.run()
    answered = scheduler.finished(asked, list(range(6)), whole=True)[1]
    assert answered is not None
    handle = json.loads(json.dumps(answered))["kvt"]["handle"]
    params = read_params({"kvt": {"handle": handle, "mapper": MAPPER}})
    assert params is not None
    assert params.handle is not None
    assert params.handle.source == CLAIM
