"""A certificate as text, as JSON, and as one HTML page that opens offline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from typing import Any

from rlpipe.certify.lines import STATISTICAL, Line
from rlpipe.certify.run import Certificate
from rlpipe.report.details import table
from rlpipe.report.write import Content, page

_WORDS = {True: "right", False: "FAULT", None: "not judged"}
_COLOURS = {True: "good", False: "bad", None: "warn"}


def summary(certificate: Certificate) -> str:
    """Return the outcome as a sentence."""
    judged = [line for line in certificate.lines if line.passed is not None]
    left = [line.name for line in certificate.lines if line.passed is None]
    unjudged = f" Not judged: {', '.join(left)}." if left else ""
    if certificate.passed:
        return f"No fault was found in the {len(judged)} lines that were judged.{unjudged}"
    named = ", ".join(cause.name for cause in certificate.causes)
    return f"{sum(line.failed for line in judged)} of {len(judged)} lines fail: {named}.{unjudged}"


def explain(certificate: Certificate) -> str:
    """Return an explanation of alpha, n and power for this certificate."""
    return (
        f"A right server fails some line with probability {certificate.alpha:g} at most (alpha; "
        f"{certificate.alpha / len(STATISTICAL):g} for each of the {len(STATISTICAL)} statistical lines). p "
        "is the probability that a right server gives samples as unusual as these. 'Would see' is the "
        "smallest fault that these samples find with the stated probability (power); four times as many "
        "samples see one half as large. The other lines compare numbers, within what rounding moves."
    )


def as_text(certificate: Certificate) -> str:
    """Format the certificate as text for a terminal."""
    width = max(len(line.name) for line in certificate.lines)
    rows = [f"{certificate.features.dialect}: {', '.join(_features(certificate)) or 'all features'}", ""]
    for line in certificate.lines:
        rows.append(f"{_WORDS[line.passed]:<10}  {line.name:<{width}}  {line.seen}")
        if line.power:
            rows.append(f"{'':<10}  {'':<{width}}  would see {line.power}")
    for cause in certificate.causes:
        rows += ["", f"{cause.name}: {cause.text}", f"  {cause.hint}"]
    return "\n".join([*rows, "", summary(certificate), explain(certificate)])


def as_json(certificate: Certificate) -> str:
    """Format the certificate as JSON for other programs."""
    return json.dumps(as_data(certificate), indent=1)


def as_data(certificate: Certificate) -> dict[str, Any]:
    """Return the certificate as plain data."""
    return {
        "passed": certificate.passed,
        "summary": summary(certificate),
        "alpha": certificate.alpha,
        "about": certificate.about,
        "features": asdict(certificate.features),
        "lines": [line.as_dict() for line in certificate.lines],
        "causes": [asdict(cause) for cause in certificate.causes],
        "seconds": {name: round(value, 1) for name, value in certificate.seconds.items()},
    }


def as_html(certificate: Certificate) -> str:
    """Format the certificate as an HTML page."""
    colour, word = ("good", "no fault found") if certificate.passed else ("bad", "fault")
    title = f"Certificate of {certificate.about.get('url', 'a server')}"
    causes = "".join(
        f'<div class="notice"><b class="bad">{escape(cause.name)}</b>: {escape(cause.text)}<br>'
        f"{escape(cause.hint)}</div>"
        for cause in certificate.causes
    )
    body = [
        f'<h1>{escape(title)}</h1><span class="badge {colour}">{word}</span>',
        f'<p class="sub">{escape(summary(certificate))}</p>',
        causes,
        table(["line", "", "seen", "would see"], map(_row, certificate.lines)),
        f"<p>{escape(explain(certificate))}</p>",
        f"<h2>What the server offers</h2><p>{escape(certificate.features.dialect)}; "
        f"{escape('; '.join(_features(certificate)) or 'all that is needed')}.</p>",
        "<h2>Details</h2>" + _details(certificate.about | {"seconds": certificate.seconds}),
    ]
    return page(Content(title=title, body="\n".join(body), figures=[], trajectories=[]))


def _row(line: Line) -> list[str]:
    return [
        f"<b>{escape(line.name)}</b><br>{escape(line.question)}",
        f'<span class="{_COLOURS[line.passed]}">{_WORDS[line.passed]}</span>',
        escape(line.seen),
        escape(line.power),
    ]


def _features(certificate: Certificate) -> list[str]:
    return certificate.features.missing()


def _details(about: Mapping[str, Any]) -> str:
    rows = [[f"<code>{escape(name)}</code>", escape(_format(value))] for name, value in about.items()]
    return table(["", ""], rows)


def _format(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number:.1f}" for name, number in value.items())
    return str(value)
