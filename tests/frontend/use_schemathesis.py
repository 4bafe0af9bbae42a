"""Requests that follow the description of the routes, or break it in one place: python use_schemathesis.py URL EXAMPLES

Ends with 0 where no answer is a 5xx, none is another than described, and what breaks the description is refused.
"""

import sys

import hypothesis
import schemathesis
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


def check_all(operation, mode, examples):
    @hypothesis.settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(mode))
    def check(case):
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()


operations = [result.ok() for result in schemathesis.openapi.from_url(sys.argv[1]).get_all_operations()]
for operation in operations:
    if operation.path not in LEFT_OUT:
        check_all(operation, schemathesis.GenerationMode.POSITIVE, int(sys.argv[2]))
        if list(operation.body) or list(operation.query):  # else there is nothing to break
            check_all(operation, schemathesis.GenerationMode.NEGATIVE, int(sys.argv[2]))
print(len(operations))
