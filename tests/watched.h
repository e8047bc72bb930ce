// Whether a sanitizer watches this program: what takes long is then done less often, since every access is
// slow.
#pragma once

namespace overspill {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kWatched = true;
#else
inline constexpr bool kWatched = false;
#endif

}  // namespace overspill
