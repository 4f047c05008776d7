"""docs/status.md names every key of `status --json`, and no other."""

import re
from pathlib import Path

from slipstream.broker.status.role_status import RoleStatus
from slipstream.broker.status.run_status import RunStatus

DOCUMENTED = re.findall(r"^\| `([^`]+)` \|", (Path(__file__).parents[2] / "docs" / "status.md").read_text(), re.M)


def test_every_key_is_documented_in_the_order_it_comes() -> None:
    assert [*RunStatus.__struct_fields__, *RoleStatus.__struct_fields__] == DOCUMENTED
