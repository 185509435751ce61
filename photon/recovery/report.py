"""The report of `photon recover` as text."""

import time

from photon.recovery.rules import Held, Life, Report


def as_text(report: Report) -> str:
    """A row for each incarnation, and what it comes to."""
    lines = []
    if report.held:
        lines.append(
            f"{'incarnation':<18}{'joiner':<24}{'state':<10}{'lost':>9}{'in flight':>11}  oldest token"
        )
    lines += map(_row, report.held)
    lines += _sums(report)
    lines += [f"note: {note}" for note in report.notes]
    if report.refused is not None:
        lines.append(f"nothing is released: {report.refused}")
    return "\n".join(lines)


def _row(one: Held) -> str:
    loss = one.loss
    oldest = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(loss.oldest_us / 1e6))
    in_flight = loss.lost + loss.young - one.lost
    who = f"{loss.incarnation:016x}  {loss.address:<24}{one.life.value:<10}"
    return f"{who}{one.lost:>9,}{in_flight:>11,}  {oldest}"


def _sums(report: Report) -> list[str]:
    found = []
    if report.plans_finished:
        found.append(f"{report.plans_finished} plans of an earlier run finished")
    if report.recovered:
        found.append(f"{report.recovered:,} events released and put into {report.inbox}")
    if report.taken:
        found.append(f"{report.taken:,} events were joined by others meanwhile")
    if report.no_input:
        found.append(
            f"{report.no_input:,} lost events are in none of the inputs: name their logs with --foreign"
        )
    if report.in_flight:
        found.append(f"{report.in_flight:,} events in flight: ask again in a minute")
    found += [what for one in report.held if one.lost and (what := _advice(one))]
    if not report.lost:
        found.append("nothing is lost" + (", as far as can be told yet" if report.in_flight else ""))
    elif not report.remaining:
        found.append("nothing is lost any more")
    elif not report.applied and report.recoverable:
        found.append(f"{report.recoverable:,} events can be joined again: --apply does it")
    return found


def _advice(one: Held) -> str:
    name = f"{one.loss.address} ({one.loss.incarnation:016x})"
    if one.life is Life.BACKFILL:
        return (
            f"{name} is a backfill's: run that again, or with --abandon, if it is not done, or say "
            "--gone-for-good to take these events from it"
        )
    if one.life is Life.UNNAMED:
        return (
            f"{name}: its output is not named, or gone, or made before outputs told who wrote to them "
            "(.lives): name every one with --out, of every datacenter, or say --gone-for-good if what is not "
            "there is deleted"
        )
    if one.life is Life.ALIVE:
        lease = f"its lease runs for {one.lease_s:.1f} s"
        return f"{name} is alive, {lease}: stop or restart that joiner, then run again"
    return ""
