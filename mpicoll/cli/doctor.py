"""``python -m mpicoll doctor``: what was found, how calls are carried out, what to change."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from dataclasses import asdict

from mpicoll import cli, settings
from mpicoll.cli.doctor_advice import advise
from mpicoll.cli.doctor_facts import (
    Findings,
    describe_process,
    describe_settings,
    describe_torch,
    examine,
    name_launcher,
)
from mpicoll.cli.doctor_machine import name_ranks
from mpicoll.cli.doctor_topology import format_table
from mpicoll.cuda.topology import LEGEND

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json and --again."""
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument(
        "--again", action="store_true", help="try device memory again, whatever is known of it"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report on rank 0; return 0, or 1 if something is wrong."""
    # init_process_group sets variables, and refuses what is misspelt: the report is to be whole.
    before = {"launcher": name_launcher(), "settings": describe_settings()}
    misspelt = settings.find_problems()
    for name in misspelt:
        del os.environ[name]
    wrong = cli.start_group()
    if wrong:
        speaks, seen = (
            cli.is_first_rank(),
            Findings([describe_process() | before | {"torch": describe_torch()}], wrong=wrong),
        )
        seen.misspelt = [misspelt]
    else:
        speaks, seen = examine(before, misspelt, options.again)
    advice = advise(seen)
    if speaks:
        show = _json if options.json else _text
        print(show(seen, advice), flush=True)
    return 1 if any(bad for bad, _ in advice) else 0


def _json(seen: Findings, advice: list[tuple[bool, str]]) -> str:
    report: dict[str, object] = {
        "ok": not any(bad for bad, _ in advice),
        "ranks": [
            {**facts, **({"capabilities": own.words()} if own else {})}
            for facts, own in zip(
                seen.facts, seen.all_ranks or [None] * len(seen.facts), strict=True
            )
        ],
        "routes": {
            "host": seen.host,
            "device": seen.device,
            "off": {name: why for name, why in seen.off.items() if why},
        },
        "clusters": seen.clusters,
        "topology": [asdict(one) for one in seen.joined],
        "advice": [{"wrong": bad, "text": text} for bad, text in advice],
    }
    return json.dumps(report, indent=1)


def _text(seen: Findings, advice: list[tuple[bool, str]]) -> str:
    lines = ["Found"]
    for name in dict.fromkeys(name for facts in seen.facts for name in facts):
        lines += _fact(name, [facts.get(name, "") for facts in seen.facts])
    if seen.host:
        lines += ["", "How calls are carried out, on arrays on the host"]
        lines += [f"  {name:<34}{route}" for name, route in seen.host.items()]
        if len(seen.clusters) > 1:
            each = " + ".join(map(str, seen.clusters))
            lines += [f"  large sums cross once between clusters of near ranks, {each} of them"]
        lines += ["", "and on arrays on a device"]
        lines += [f"  {name:<34}{route}" for name, route in seen.device.items()]
        if not seen.device:
            lines += ["  no rank has a GPU that can be used" if not seen.bad_route else "  ?"]
        else:
            lines += ["", "Routes of arrays on a device, the best first"]
            lines += _device_routes(seen)
    for one in seen.joined:
        lines += ["", f"GPUs and network cards of {one.host}"]
        lines += [f"  {line}" for line in (*format_table(one), f"({LEGEND})")]
    lines += [
        "",
        "What to change" if advice else "No problems found",
    ]
    lines += [
        textwrap.fill(
            text, 100, initial_indent="  WRONG: " if bad else "  ", subsequent_indent="    ",
            break_long_words=False, break_on_hyphens=False,
        )
        for bad, text in advice
    ]  # fmt: skip
    return "\n".join(lines)


def _device_routes(seen: Findings) -> list[str]:
    """Say of each route of device memory whether it is taken, why not, and what blocks the host."""
    from mpicoll.routes.registry import DEVICE

    def words(name: str, why: str) -> str:
        if why:
            return f"not: {why}"
        waits = DEVICE[name].policy.host_waits_for
        return "taken" if waits is None else f"taken; the host waits {waits or 'for nothing'}"

    return [
        textwrap.fill(
            f"{name:<13}{words(name, why)}",
            110,
            initial_indent="  ",
            subsequent_indent=" " * 15,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, why in seen.off.items()
    ]


def _fact(name: str, values: list[str]) -> list[str]:
    """Format a fact: one line if the ranks agree, else one for each value."""
    if len(set(values)) == 1:
        return [f"  {name:<14}{values[0]}"] if values[0] else []
    where: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        where.setdefault(value, []).append(rank)
    return [f"  {name:<14}{name_ranks(ranks)}: {value}" for value, ranks in where.items()]
