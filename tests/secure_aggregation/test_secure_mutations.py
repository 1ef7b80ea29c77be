"""Changes that would open an update, or make a sum or a figure wrong, in silence: each is killed by
a test that was there for it."""

from pathlib import Path
from types import ModuleType

import pytest
import test_consistency
import test_noise_and_rounding
import test_protocol
from mutants import Killer, killed_by, mutated

from blackthorn.secure_aggregation import client, graph, quantisation

_masks = killed_by(test_protocol.test_either_mask_alone_hides_an_update_and_none_is_used_twice)
_both = killed_by(test_protocol.test_nobody_opens_both_secrets_of_one_client)
_all_but_one = killed_by(test_protocol.test_a_server_that_says_all_but_one_vanished_is_refused)
_compares = killed_by(
    test_consistency.test_lists_that_would_open_the_sum_of_fewer_open_nothing, 20, 16, 15
)
_of_all = killed_by(
    test_consistency.test_of_fewer_that_told_their_keys_as_many_have_to_agree_as_of_all
)
_own_tags = killed_by(
    test_consistency.test_a_tag_that_is_not_its_senders_for_this_client_and_round_is_refused,
    test_consistency.the_shares_in_its_place,
)
_wraps = killed_by(
    test_noise_and_rounding.test_nothing_wraps_where_all_clients_send_the_same_longest_update, 1
)
_noise = killed_by(
    test_noise_and_rounding.test_the_noise_of_the_sum_is_that_of_the_multiplier_with_the_fewest_survivors
)
_length = killed_by(
    test_noise_and_rounding.test_no_update_is_longer_than_the_sensitivity_that_is_charged, 100
)


@pytest.mark.parametrize(
    ("module", "change", "killer"),
    [
        # Seeds that are used again.
        (client, ("seed = entropy(KEY_BYTES)", "seed = bytes(KEY_BYTES)"), _masks),
        (client, ("expand(self._mask_seed(known[other])", "expand(self.session"), _masks),
        # What a server may ask.
        (client, ("if alive_here & gone_here:", "if False:"), _both),
        (client, ("nothing, nothing, _UNMASKED)", "nothing, nothing, _MASKED)"), _both),
        (
            client,
            ("if len(around) + 1 < needed or len(alive_here) < terms.survivors:", "if False:"),
            _all_but_one,
        ),
        # Clients that do not compare, ask too few, or take for a tag what is none.
        (client, ("self.client)) != digest:", "self.client)) is None:"), _compares),
        (client, ("if agreeing < needed:", "if False:"), _compares),
        (graph, ("self.clients if self.is_complete else neighbourhood", "neighbourhood"), _of_all),
        (client, ('"consistency", self.session', '"shares", self.session'), _own_tags),
        # A modulus that is too small, noise that counts on those who vanish, an update too long.
        (quantisation, ("scale * self.clients * self.bound", "scale * self.bound"), _wraps),
        (quantisation, ("** 2 / self.survivors", "** 2 / self.clients"), _noise),
        (quantisation, ("min(1.0, self.bound / max(length, 1e-300))", "1.0"), _length),
    ],
)
def test_a_change_is_noticed(
    module: ModuleType,
    change: tuple[str, str],
    killer: Killer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # ValueError: what the numbers are checked against as they are made.
    caught = (AssertionError, ValueError, pytest.fail.Exception)
    with mutated(module, change), pytest.raises(caught):
        killer(tmp_path, monkeypatch)
