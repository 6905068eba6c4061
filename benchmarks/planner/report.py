"""The text of the planner's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEMES = (
    ("laboratory", "without the row's laboratory"),
    ("source", "without the row's table"),
    ("in_sample", "all rows fitted"),
)


def show(found: Mapping[str, Any]) -> None:
    """Print the figures, the worst validation first."""
    _print_throughput(found)
    _print_intervals(found["interval"])
    _print_curve(found["own_runs"])
    _print_choice(found["choice"])
    print("\nspeed not scored, without the row's laboratory:")
    _print_errors(found["not_scored"])
    print("rows that cannot be predicted:")
    for reason, count in found["unanswered"].items():
        print(f"  {count:>4} {reason}")
    for part, title in (("others", "other rows"), ("set_by", "rows that the constants were set by")):
        _print_memory(found["memory"][part], found["crashes"][part], title)
    _print_fit(found)
    for name, title in SCHEMES:
        if name in found["worst"]:
            print(f"\nfurthest off, {title}:")
            for line in found["worst"][name]:
                print(f"  {line}")
    print()
    for name, value in found["search_ms"].items():
        print(f"{name:<32}{value:>8.0f} ms")


def _print_throughput(found: Mapping[str, Any]) -> None:
    for name, title in SCHEMES:
        speed = found["throughput"][name]
        print(f"throughput, {title}: {_error_text(speed)}, mean of the tables' means ", end="")
        print(f"{speed['mean_of_source_means']:.1%}")
        print(f"  without {speed['largest_table']}: {_error_text(speed['without_largest'])}")
        if name == "laboratory":
            _print_errors(speed["laboratories"])
            print("the same by class (chip and precision fitted or new to the constants):")
            _print_errors(found["classes"])
        print("by table:")
        _print_errors(speed["sources"])
        print()


def _print_fit(found: Mapping[str, Any]) -> None:
    print("\nlinearised folds against folds fitted in full, median error of the fitted sample:")
    for name, gap in found["linearised"].items():
        print(f"  {name:<28} linear {gap['linear']:.1%}  full {gap['full']:.1%}")
    single = {name: source for name, source in found["one_source"].items() if name != "of"}
    print(
        f"\n{len(single)} of {found['one_source']['of']} constants with over 80 % of their information from ",
        end="",
    )
    print("one table; their prior or their family holds them:")
    for name, source in single.items():
        print(f"  {name:<44}{source}")


def _error_text(item: Mapping[str, Any]) -> str:
    return f"{item['rows']} rows, median {item['median']:.1%}, p90 {item['p90']:.1%}"


def _print_errors(found: Mapping[str, Mapping[str, Any]]) -> None:
    for name, item in found.items():
        print(
            f"  {name:<36}{item['rows']:>5} rows  bias {item['bias']:+7.1%}  median {item['median']:6.1%}  "
            f"mean {item['mean']:6.1%}  p90 {item['p90']:6.1%}"
        )


def _print_intervals(found: Mapping[str, Any]) -> None:
    covered = found["coverage"]
    print(
        f"intervals of {found['level']:.0%}, each made without the row's laboratory: {covered['rows']:.1%} ",
        end="",
    )
    print(f"of the rows within, {covered['by_source']:.1%} as the mean of the tables")
    for name, item in found["classes"].items():
        inside = covered["classes"].get(name)
        print(
            f"  {name:<36} x {item['factor']:<6} ({item['rows']} rows, {item['laboratories']} laboratories)",
            end="",
        )
        print(f"  covers {inside['covered']:.1%} of {inside['rows']}" if inside else "  no row of its own")
    for name, item in found["pairs"].items():
        print(f"  two layouts, {name:<23} x {item['factor']:<6} ({item['groups']} groups)")


def _print_curve(found: Mapping[str, Mapping[str, Any]]) -> None:
    first = next(iter(found.values()))
    print(f"\nafter runs of a cluster's own ({first['clusters']} clusters of {first['tables']} tables):")
    for runs, point in found.items():
        print(
            f"  {runs} runs  median {point['median']:6.1%}  p90 {point['p90']:6.1%}  "
            f"mean of the tables' means {point['mean_of_source_means']:6.1%}  80 % within x {point['factor']}"
        )


def _print_choice(found: Mapping[str, Mapping[str, Any]]) -> None:
    for name, title in SCHEMES:
        choice = found[name]
        print(
            f"\nchoice, {title}: {choice['groups']} groups, loss {choice['mean']:.1%} on average, "
            f"p90 {choice['p90']:.1%}, {choice['worst']:.1%} at worst ({choice['worst_group']}), "
            f"Kendall's tau {choice['tau']:.2f}"
        )
        for source, loss in choice["sources"].items():
            print(
                f"  {source:<28}{loss['groups']:>5} groups  mean {loss['mean']:.1%}  "
                f"worst {loss['worst']:.1%}  tau {loss['tau']:.2f}"
            )


def _print_memory(held: Mapping[str, Any], gone: Mapping[str, int], title: str) -> None:
    print()
    if held["rows"]:
        print(f"memory, {title}: {_error_text(held)}")
        _print_errors(held["sources"])
    rejected, kept = gone["rejected"] / gone["of"], gone["kept"] / gone["succeeded"]
    print(f"crashed, {title}: {gone['rejected']} of {gone['of']} rejected ({rejected:.1%}); ", end="")
    print(f"{gone['kept']} of {gone['succeeded']} that ran kept ({kept:.1%})")
