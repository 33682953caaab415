# SPDX-License-Identifier: Apache-2.0
"""The paths of the service's methods, as gRPC names them."""

from typing import Final

_SERVICE = "/flowslot.v1.EmulatedSwitch/"
FETCH_FEEDBACK: Final = _SERVICE + "FetchFeedback"
UPDATE_SCHEDULE: Final = _SERVICE + "UpdateSchedule"
NEGOTIATE: Final = _SERVICE + "Negotiate"
DESCRIBE: Final = _SERVICE + "Describe"
