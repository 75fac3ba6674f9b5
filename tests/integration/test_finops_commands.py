"""The money commands as a user runs them, on the books that a real gateway left."""

import asyncio
import csv
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.__main__ import main
from tests.fakes.gateway import ADMIN_KEY, ENVIRONMENT, backend, route, running

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
TODAY = datetime.now(UTC).date()
SPAN = ("--from", str(TODAY - timedelta(days=1)), "--to", str(TODAY + timedelta(days=2)))


class Books:
    """The folder of a gateway that served six requests and was stopped."""

    def __init__(self, config: Path, model: str) -> None:
        self.config = config
        self.model = model

    def run(self, *arguments: str, expect: int = 0) -> Result:
        result = CliRunner().invoke(main, [*arguments, "--config", str(self.config)])
        assert result.exit_code == expect, result.output
        return result

    def json(self, *arguments: str, expect: int = 0) -> object:
        return json.loads(self.run(*arguments, "--format", "json", expect=expect).stdout)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Books:
    """Served once for the module; the commands only add to it, in the order of the tests."""
    folder = tmp_path_factory.mktemp("books")
    api: dict[str, int] = {}

    async def serve() -> tuple[Path, str]:
        async with running(folder) as gateway:
            table = backend("b", gateway.scripted_url).replace("price =", "# no price:")
            gateway.configure(table + route("m", "b"))
            for _ in range(6):
                answer = await gateway.client.post(CHAT, json=BODY, headers=gateway.auth)
                assert answer.status_code == 200
            settled = await gateway.next_settled(6)
            await gateway.service.worker.flush()
            admin = {"authorization": f"Bearer {ADMIN_KEY}"}
            for path in ("chargeback?by=tenant,meter", "waste", "capacity", "forecast", "variance"):
                found = await gateway.client.get(f"/admin/v1/reports/{path}", headers=admin)
                assert found.status_code == 200, found.text
                assert found.json()
                api[path] = len(found.json().get("lines", ()))
            as_csv = await gateway.client.get("/admin/v1/reports/savings?format=csv", headers=admin)
            assert as_csv.headers["content-type"].startswith("text/csv")
            for wrong, status in (("nonsense", 404), ("chargeback?by=shoe", 400)):
                found = await gateway.client.get(f"/admin/v1/reports/{wrong}", headers=admin)
                assert found.status_code == status
            attempt = settled[0].attempts[-1]
            return gateway.config_path, attempt.answered_model or attempt.model

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        config, model = asyncio.run(serve())
        assert api["chargeback?by=tenant,meter"] == 2
        yield Books(config, model)


def test_prices_are_imported_compared_published_and_applied(books: Books, tmp_path: Path) -> None:
    """From a CSV to corrected books: a draft, its difference, publication, re-rating."""
    provider = books.json("report", "chargeback", *SPAN, "--by", "provider")["lines"][0]["provider"]  # type: ignore[index]  # JSON
    prices = tmp_path / "contract.csv"
    prices.write_text(
        "provider,model,meter,unit_price,list_unit_price\n"
        f"{provider},{books.model},Input Tokens,3,4\n"
        f"{provider},{books.model},Output Tokens,9,12\n"
    )
    draft = books.json("price", "import", "csv", str(prices), "--tier", "batch=0.5")
    assert (draft["label"], draft["prices"], draft["is_published"]) == ("contract@1", 4, False)  # type: ignore[index]  # JSON
    assert ["contract@1", "draft"] in [
        line.split()[:2] for line in books.run("price", "list").output.splitlines()
    ]
    books.run("price", "diff", "genai-prices", "contract@1", expect=1)
    books.run("price", "diff", "contract@1", "contract@1")
    assert "4 prices" in books.run("price", "publish", "contract@1").output
    assert "published already" in books.run("price", "publish", "contract@1", expect=1).output
    assert len(books.json("price", "list", "contract")) == 4  # type: ignore[arg-type]  # JSON
    dry = books.run("price", "rerate", *SPAN, "--book", "contract")
    assert "would change" in dry.output
    books.run("price", "rerate", *SPAN, "--book", "contract", "--apply")
    again = books.json("price", "rerate", *SPAN, "--book", "contract", "--apply")
    assert again["changes"] == []  # type: ignore[index,call-overload]  # JSON
    (total,) = books.json("report", "chargeback", *SPAN)["totals"]  # type: ignore[index]  # JSON
    cost = (total["input_tokens"] * 3 + total["output_tokens"] * 9) / Decimal(1_000_000)
    assert Decimal(total["cost"]) == cost > 0
    assert total["unpriced_lines"] == 0
    assert all("BROKEN" not in line for line in books.run("reconcile").output.splitlines())


def test_a_wrong_price_list_is_one_line_each(books: Books, tmp_path: Path) -> None:
    """What is wrong with the file, and exit code 2."""
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("provider,model,meter,unit_price\nx,m,Coffee,1\nx,m,Input Tokens,dear\n")
    output = books.run("price", "import", "csv", str(wrong), expect=2).output
    assert "line 2: unknown meter" in output and "line 3: 'dear'" in output
    assert "no price book nothing" in books.run("price", "list", "nothing", expect=2).output
    books.run("price", "import", "csv", str(wrong), "--tier", "batch=cheap", expect=2)


def test_the_export_is_what_chargeback_says(books: Books, tmp_path: Path) -> None:
    """Σ BilledCost = the report's total; list prices come from the book."""
    out = tmp_path / "focus.csv"
    books.run("report", "focus", *SPAN, "--out", str(out))
    with out.open() as file:
        rows = list(csv.DictReader(file))
    (total,) = books.json("report", "chargeback", *SPAN)["totals"]  # type: ignore[index]  # JSON
    assert sum(Decimal(row["BilledCost"]) for row in rows) == Decimal(total["cost"])
    assert {row["ListUnitPrice"] for row in rows if row["SkuMeter"] == "Input Tokens"} == {"4"}
    manifest = json.loads((tmp_path / "focus.csv.manifest.json").read_text())
    assert manifest["sums"]["USD"]["BilledCost"] == total["cost"]


def test_bills_are_compared_and_months_stay_open_until_they_are_over(
    books: Books, tmp_path: Path
) -> None:
    """A residual is exit code 1; the running month cannot be closed."""
    bill = tmp_path / "bill.csv"
    bill.write_text(f"day,amount\n{TODAY},5\n{TODAY - timedelta(days=1)},1.5\n")
    provider = books.json("report", "chargeback", *SPAN, "--by", "provider")["lines"][0]["provider"]  # type: ignore[index]  # JSON
    imported = books.run("bill", "import", "csv", str(bill), "--provider", provider)
    assert "2 lines" in imported.output and "6.500000000000000 USD" in imported.output
    assert "nothing to do" in (
        books.run("bill", "import", "csv", str(bill), "--provider", provider).output
    )
    compared = books.run("bill", "compare", *SPAN, expect=1)
    assert "residual" in compared.output
    month = f"{TODAY:%Y-%m}"
    assert "not over" in books.run("period", "close", month, expect=1).output
    assert "is not closed" in books.run("reconcile", "--month", month).output
    books.run("reconcile", "--month", "november", expect=2)
    assert books.run("period", "list").output.startswith("month")


def test_every_report_has_something_to_say(books: Books, tmp_path: Path) -> None:
    """Text, CSV and JSON of each report; statement and journal as files."""
    month = f"{TODAY:%Y-%m}"
    for name in ("capacity", "savings", "waste", "variance", "forecast"):
        assert books.run("report", name, *SPAN).output
        assert books.json("report", name, *SPAN)
        assert books.run("report", name, *SPAN, "--format", "csv").output
    books.run("report", "whatif", *SPAN, "--as", "openai/gpt-4o-mini")
    books.run("report", "whatif", *SPAN, "--as", "openai/no-such-model", expect=2)
    by_meter = books.run("report", "chargeback", *SPAN, "--by", "meter,waste").output
    assert "Input Tokens" in by_meter
    books.run("report", "chargeback", *SPAN, "--by", "meter", "--basis", "full", expect=2)
    books.run("report", "chargeback", *SPAN, "--basis", "full", "--idle-policy", "even")
    statement = tmp_path / "statement.html"
    names = books.json("report", "chargeback", *SPAN, "--by", "tenant")["lines"]  # type: ignore[index]  # JSON
    tenant = names[0]["tenant_name"]
    books.run("report", "statement", "--tenant", tenant, "--month", month, "--out", str(statement))
    assert "Total due" in statement.read_text()
    books.run("report", "statement", "--tenant", "nobody", "--month", month, expect=2)
    journal = list(
        csv.DictReader(books.run("report", "journal", "--month", month).output.splitlines())
    )
    assert sum(Decimal(e["debit"]) - Decimal(e["credit"]) for e in journal) == 0
