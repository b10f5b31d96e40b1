"""Places of half-open breakers: equal shares, given back, free again when their time is over."""

from service.breaker import Key
from service.probes import Probes

KEY = Key("m", "sha256:1", "chat", 32)
OTHER = KEY._replace(domain="code")


def taken(*clients: str, until_seconds: float = 10) -> Probes:
    probes = Probes()
    for number, client in enumerate(clients):
        probes.take(KEY, str(number), client, until_seconds)
    return probes


def free(probes: Probes, client: str, *, clients: int, now: float = 0) -> bool:
    return probes.free(KEY, client, now, places=4, clients=clients)


def test_who_is_alone_may_have_all() -> None:
    assert free(taken("a", "a", "a"), "a", clients=1)
    assert not free(taken("a", "a", "a", "a"), "a", clients=1)


def test_nobody_has_more_than_an_equal_share() -> None:
    assert not free(taken("a", "a"), "a", clients=2)
    assert free(taken("a", "a"), "b", clients=2)
    assert free(taken("a"), "a", clients=2)


def test_what_was_taken_alone_counts_as_one_share() -> None:
    assert free(taken("a", "a", "a", "a"), "b", clients=2)
    assert free(taken("a", "a", "a", "a", "b"), "b", clients=2)
    assert not free(taken("a", "a", "a", "a", "b", "b"), "b", clients=2)


def test_more_clients_than_places_get_one_each_while_there_are_any() -> None:
    assert free(taken("a", "b", "c"), "d", clients=9)
    assert not free(taken("a", "b", "c"), "c", clients=9)
    assert not free(taken("a", "b", "c", "d"), "e", clients=9)


def test_a_place_is_free_again_when_given_back_or_too_old() -> None:
    probes = taken("a", "a", "a", "a")
    probes.give_back(KEY, "2")
    probes.give_back(KEY, "2")
    probes.give_back(OTHER, "2")
    assert free(probes, "a", clients=1)
    assert free(taken("a", "a", "a", "a"), "a", clients=1, now=11)
    assert not free(taken("a", "a", "a", "a"), "a", clients=1, now=10)


def test_breakers_do_not_share_places() -> None:
    probes = taken("a", "a", "a", "a")
    assert probes.free(OTHER, "a", 0, places=4, clients=1)
