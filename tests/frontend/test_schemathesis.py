"""schemathesis, over the description of the routes: no answer is a 5xx, and none is another than the description says.

Requests follow the description, or break it in one place; these must be refused.
"""

import hypothesis
import pytest
import schemathesis
from frontend_harness import Server
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

CHECKS = [
    not_a_server_error,
    checks.content_type_conformance,
    checks.negative_data_rejection,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.status_code_conformance,
]
LEFT_OUT = {
    "/start_profile": "the server would write where it is told to",
    "/update_weights_from_disk": "a name might be asked of a hub",
}


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s")) as server:
        server.engine.tokens_per_step = 100
        schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
        yield [result.ok() for result in schema.get_all_operations() if result.ok().path not in LEFT_OUT]
        assert server.request("GET", "/health")[0] == 200
        server.wait_for(lambda: not server.engine.live)


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
@pytest.mark.parametrize("examples", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_all_is_as_described(operations, mode, examples):
    checked = 0
    for operation in operations:
        if mode is schemathesis.GenerationMode.NEGATIVE and not (list(operation.body) or list(operation.query)):
            continue  # there is nothing to break

        @hypothesis.settings(
            max_examples=examples, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(mode))
        def check(case):
            nonlocal checked
            case.call_and_validate(checks=CHECKS, timeout=60)
            checked += 1

        check()
    assert checked > 15
