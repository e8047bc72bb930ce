// Prompt lookup (Saxena 2023, "Prompt Lookup Decoding"): a text often goes on as it did before.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace overspill::inference {

/// At most `most` tokens that followed the text's last three tokens, or else its last two, where these last
/// stood before in the text. Often none.
std::vector<int32_t> look_up(std::span<const int32_t> text, int64_t most);

}  // namespace overspill::inference
