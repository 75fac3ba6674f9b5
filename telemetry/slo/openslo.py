"""OpenSLO v1, the vendor-neutral form: export of ours, import of theirs.

https://github.com/OpenSLO/OpenSLO, `kind: SLO` with an inline indicator. What is exported carries
the selectors as PromQL; what only we know (the guard for low traffic, owner, runbook) goes into
annotations, so that an export read again is the same declaration. Imported are ratio metrics whose
queries are plain selectors on a Prometheus source and time windows of days; what cannot be carried
over is refused by name, never dropped.
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final

import msgspec

from telemetry.metrics import REGISTRY, Metric
from telemetry.slo.declaration import VERSION, SloFile, SloInvalid, check, selector
from telemetry.slo.rules import events

API: Final = "openslo/v1"
_OURS: Final = "meterline.io/slo"


def exported(file: SloFile, registry: Mapping[str, Metric] = REGISTRY) -> str:
    """One YAML document an objective."""
    documents = []
    for slo in file.slos:
        counted = events(slo, registry)
        if counted is None:
            assert slo.sli.threshold is not None
            one = slo.sli.threshold
            metric: dict[str, Any] = {"thresholdMetric": _query(one.expr)}
        else:
            part = {"bad": counted.bad} if counted.bad is not None else {"good": counted.good}
            side, chosen = next(iter(part.items()))
            metric = {
                "ratioMetric": {
                    "counter": True,
                    side: _query(str(chosen)),
                    "total": _query(str(counted.total)),
                }
            }
        objective: dict[str, Any] = {"target": float(slo.objective_percent / 100)}
        if slo.sli.threshold is not None:
            names = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}
            objective |= {
                "op": names[slo.sli.threshold.op],
                "value": float(slo.sli.threshold.value),
            }
        documents.append(
            {
                "apiVersion": API,
                "kind": "SLO",
                "metadata": {
                    "name": slo.name,
                    "labels": {**file.labels},
                    "annotations": {_OURS: msgspec.json.encode(slo).decode()},
                },
                "spec": {
                    "service": file.service,
                    "description": slo.description,
                    "indicator": {"metadata": {"name": slo.name}, "spec": metric},
                    "timeWindow": [{"duration": slo.window, "isRolling": True}],
                    "budgetingMethod": "Timeslices" if counted is None else "Occurrences",
                    "objectives": [objective],
                },
            }
        )
    return "---\n".join(msgspec.yaml.encode(document).decode() for document in documents)


def imported(text: str, registry: Mapping[str, Metric] = REGISTRY) -> SloFile:
    """A declaration from OpenSLO documents. SloInvalid: what cannot be carried over, by document
    and field; or what is wrong with the result."""
    problems: list[str] = []
    slos: list[dict[str, Any]] = []
    service = "meterline"
    labels: dict[str, str] = {}
    for at, document in enumerate(_documents(text)):
        where = f"document {at + 1}"
        if not isinstance(document, dict) or document.get("apiVersion") != API:
            problems.append(f"{where}: not an {API} document")
            continue
        if document.get("kind") != "SLO":
            problems.append(
                f"{where}: kind {document.get('kind')!r}; only SLO is read, with its "
                "indicator inline"
            )
            continue
        try:
            slos.append(_slo(document))
        except (KeyError, TypeError, IndexError) as error:
            problems.append(f"{where}: misses or misplaces {error}")
            continue
        except ValueError as error:
            problems.append(f"{where}: {error}")
            continue
        service = document["spec"].get("service", service)
        labels |= document["metadata"].get("labels") or {}
    if not slos and not problems:
        problems.append("no document")
    if problems:
        raise SloInvalid(problems)
    written = {"version": VERSION, "service": service, "labels": labels, "slos": slos}
    try:
        file = msgspec.convert(written, SloFile)
    except msgspec.ValidationError as error:
        raise SloInvalid([str(error)]) from error
    wrong = list(check(file, registry))
    if wrong:
        raise SloInvalid(wrong)
    return file


def written(file: SloFile) -> str:
    """A declaration as a file of ours, without what is the default anyway."""
    plain = msgspec.to_builtins(file)
    defaults = msgspec.to_builtins(SloFile(version=VERSION))
    kept = {k: v for k, v in plain.items() if k == "version" or v != defaults.get(k)}
    kept["slos"] = [_trimmed(slo) for slo in plain["slos"]]
    return msgspec.yaml.encode(kept).decode()


def _trimmed(value: Any) -> Any:
    if isinstance(value, dict):
        slim = {k: _trimmed(v) for k, v in value.items()}
        return {k: v for k, v in slim.items() if v not in (None, {}, [], "")}
    return value


def _documents(text: str) -> Iterable[Any]:
    for part in f"\n{text}".split("\n---"):
        if part.strip():
            try:
                yield msgspec.yaml.decode(part)
            except msgspec.DecodeError as error:
                raise SloInvalid([f"not YAML: {' '.join(str(error).split())}"]) from error


def _slo(document: dict[str, Any]) -> dict[str, Any]:
    metadata, spec = document["metadata"], document["spec"]
    ours = (metadata.get("annotations") or {}).get(_OURS)
    if ours is not None:
        return dict(msgspec.json.decode(ours))
    if "indicator" not in spec:
        raise ValueError("the indicator must be inline, not a reference")
    metric = spec["indicator"]["spec"]
    objectives = spec["objectives"]
    if len(objectives) != 1:
        raise ValueError("exactly one objective; write one SLO for each")
    objective = objectives[0]
    target = objective.get("target")
    percent = objective.get("targetPercent") if target is None else Decimal(str(target)) * 100
    if percent is None:
        raise ValueError("objectives[0].target is missing")
    windows = spec["timeWindow"]
    if len(windows) != 1 or not windows[0].get("isRolling", False):
        raise ValueError("timeWindow: one rolling window; calendar windows have no burn rate")
    return {
        "name": metadata["name"],
        "description": spec.get("description", ""),
        "objective": f"{Decimal(str(percent)).normalize():f}",
        "window": windows[0]["duration"],
        "sli": _sli(metric, objective),
    }


def _sli(metric: dict[str, Any], objective: dict[str, Any]) -> dict[str, Any]:
    if "thresholdMetric" in metric:
        ops = {"lt": "<", "lte": "<=", "gt": ">", "gte": ">="}
        if objective.get("op") not in ops or "value" not in objective:
            raise ValueError("a threshold needs objectives[0].op (lt, lte, gt, gte) and value")
        return {
            "threshold": {
                "expr": _asked(metric["thresholdMetric"]),
                "op": ops[objective["op"]],
                "value": str(objective["value"]),
            }
        }
    ratio = metric["ratioMetric"]
    if not ratio.get("counter", False):
        raise ValueError("ratioMetric.counter must be true: rates are taken by the rules")
    total = _asked(ratio["total"])
    selector(total)
    if "good" in ratio:
        good = _asked(ratio["good"])
        selector(good)
        return {"ratio": {"good": good, "total": total}}
    bad = selector(_asked(ratio["bad"]))
    shared = selector(total).matchers
    if bad.series != selector(total).series or any(m.op not in ("=", "=~") for m in bad.matchers):
        raise ValueError("ratioMetric.bad must be a part of total: the same counter, more matchers")

    def values(text: str, op: str) -> str | list[str]:
        return text if op == "=" else text.split("|")

    return {
        "availability": {
            "metric": bad.series,
            "match": {m.label: values(m.value, m.op) for m in shared},
            "bad": {m.label: values(m.value, m.op) for m in bad.matchers if m not in shared},
        }
    }


def _asked(metric: dict[str, Any]) -> str:
    source = metric["metricSource"]
    if str(source.get("type", "Prometheus")).lower() != "prometheus":
        raise ValueError(f"metricSource.type {source['type']!r}: only Prometheus")
    return str(source["spec"]["query"])


def _query(text: str) -> dict[str, Any]:
    return {"metricSource": {"type": "Prometheus", "spec": {"query": text}}}
