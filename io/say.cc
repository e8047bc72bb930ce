#include "io/say.h"

#include <cstdio>

namespace overspill::io {

// In one call, so that lines of several threads do not mix, and from no memory that would have to be taken.
void say_on_stderr(std::string_view line) noexcept {
  static_cast<void>(std::fprintf(stderr, "%.*s\n", static_cast<int>(line.size()), line.data()));
}

}  // namespace overspill::io
