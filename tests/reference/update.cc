#include "tests/reference/update.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "tests/reference/bits.h"

namespace {

using overspill::reference::as_bits;
using overspill::reference::as_float;

constexpr int64_t kTwo32 = int64_t{1} << 32;

float rounded(double x) {
  return static_cast<float>(x);
}

// ---- the optimizers: one element

struct Element {
  float p, g;
  float s[2];
};

void adam(Element& e, const double* h, double step) {
  const double lr = h[0], beta1 = h[1], beta2 = h[2], decay = h[4];
  float &m = e.s[0], &v = e.s[1];
  if (h[5] == 0 && rounded(decay) != 0) e.g = std::fma(rounded(decay), e.p, e.g);
  if (h[5] != 0) e.p *= rounded(1 - lr * decay);
  m = std::fma(rounded(1 - beta1), e.g - m, m);
  const float square = e.g * e.g;
  v = std::fma(rounded(1 - beta2), square, rounded(beta2) * v);
  const float step_size = rounded(lr / (1 - std::pow(beta1, step)));
  const float inverse = rounded(1 / std::sqrt(1 - std::pow(beta2, step)));
  e.p = std::fma(-step_size, m / std::fma(std::sqrt(v), inverse, rounded(h[3])), e.p);
}

void adagrad(Element& e, const double* h, double step) {
  if (rounded(h[2]) != 0) e.g = std::fma(rounded(h[2]), e.p, e.g);
  e.s[0] = std::fma(e.g, e.g, e.s[0]);
  const float rate = rounded(h[0] / (1 + (step - 1) * h[1]));
  e.p = std::fma(-rate, e.g / (std::sqrt(e.s[0]) + rounded(h[3])), e.p);
}

void lion(Element& e, const double* h, double) {
  float& m = e.s[0];
  const float mixed = std::fma(rounded(1 - h[1]), e.g - m, m);
  float direction = 0;
  if (mixed > 0) direction = 1;
  if (mixed < 0) direction = -1;
  const float decayed = e.p * rounded(1 - h[0] * h[3]);
  e.p = std::fma(-rounded(h[0]), direction, decayed);
  m = std::fma(rounded(1 - h[2]), e.g - m, m);
}

void momentum(Element& e, const double* h, double step) {
  if (rounded(h[3]) != 0) e.g = std::fma(rounded(h[3]), e.p, e.g);
  const float share = step == 1 || h[1] == 0 ? 1.0f : rounded(1 - h[2]);
  const float kept = e.s[0] * rounded(h[1]);
  e.s[0] = std::fma(share, e.g, kept);
  float direction = e.s[0];
  if (h[4] != 0 && rounded(h[1]) != 0) direction = std::fma(rounded(h[1]), e.s[0], e.g);
  e.p = std::fma(-rounded(h[0]), direction, e.p);
}

void sgd(Element& e, const double* h, double) {
  if (rounded(h[1]) != 0) e.g = std::fma(rounded(h[1]), e.p, e.g);
  e.p = std::fma(-rounded(h[0]), e.g, e.p);
}

float rmsprop_direction(Element& e, const double* h) {
  if (rounded(h[3]) != 0) e.g = std::fma(rounded(h[3]), e.p, e.g);
  const float square = e.g * e.g;
  e.s[0] = std::fma(rounded(1 - h[1]), square, rounded(h[1]) * e.s[0]);
  return e.g / (std::sqrt(e.s[0]) + rounded(h[2]));
}

void rmsprop(Element& e, const double* h, double) {
  e.p = std::fma(-rounded(h[0]), rmsprop_direction(e, h), e.p);
}

void rmsprop_momentum(Element& e, const double* h, double) {
  float step = rmsprop_direction(e, h);
  if (rounded(h[4]) != 0) step = e.s[1] = std::fma(rounded(h[4]), e.s[1], step);
  e.p = std::fma(-rounded(h[0]), step, e.p);
}

void nadam(Element& e, const double* h, double step) {
  const double lr = h[0], beta1 = h[1], beta2 = h[2], decay = h[4];
  const auto mu = [&](double t) { return beta1 * (1 - 0.5 * std::pow(0.96, t * h[5])); };
  double product = 1;
  for (double t = 1; t <= step && t <= 100'000; ++t) product *= mu(t);  // 0 long before that
  if (h[6] == 0 && rounded(decay) != 0) e.g = std::fma(rounded(decay), e.p, e.g);
  if (h[6] != 0) e.p *= rounded(1 - lr * decay);
  float &m = e.s[0], &v = e.s[1];
  m = std::fma(rounded(1 - beta1), e.g - m, m);
  const float square = e.g * e.g;
  v = std::fma(rounded(1 - beta2), square, rounded(beta2) * v);
  const float inverse = rounded(1 / std::sqrt(1 - std::pow(beta2, step)));
  const float root = std::fma(std::sqrt(v), inverse, rounded(h[3]));
  const float of_gradient = rounded(lr * (1 - mu(step)) / (1 - product));
  const float of_average = rounded(lr * mu(step + 1) / (1 - product * mu(step + 1)));
  e.p = std::fma(-of_gradient, e.g / root, e.p);
  e.p = std::fma(-of_average, m / root, e.p);
}

void adamax(Element& e, const double* h, double step) {
  if (rounded(h[4]) != 0) e.g = std::fma(rounded(h[4]), e.p, e.g);
  float &m = e.s[0], &norm = e.s[1];
  m = std::fma(rounded(1 - h[1]), e.g - m, m);
  const float faded = norm * rounded(h[2]), size = std::fabs(e.g) + rounded(h[3]);
  norm = std::isnan(faded) || std::isnan(size) ? NAN : std::max(faded, size);
  e.p = std::fma(-rounded(h[0] / (1 - std::pow(h[1], step))), m / norm, e.p);
}

void adadelta(Element& e, const double* h, double) {
  if (rounded(h[3]) != 0) e.g = std::fma(rounded(h[3]), e.p, e.g);
  const float square = e.g * e.g, rho = rounded(h[1]), rest = rounded(1 - h[1]), eps = rounded(h[2]);
  e.s[0] = std::fma(rest, square, rho * e.s[0]);
  const float ratio = std::sqrt(e.s[1] + eps) / std::sqrt(e.s[0] + eps);
  const float delta = ratio * e.g;
  const float moved = delta * delta;
  e.s[1] = std::fma(rest, moved, rho * e.s[1]);
  e.p = std::fma(-rounded(h[0]), delta, e.p);
}

struct Optimizer {
  const char* name;
  int states;
  bool is_signed[2];
  void (*update)(Element&, const double*, double);
};
constexpr Optimizer kOptimizers[] = {{"adam", 2, {true, false}, adam},
                                     {"adagrad", 1, {false, false}, adagrad},
                                     {"lion", 1, {true, false}, lion},
                                     {"momentum", 1, {true, false}, momentum},
                                     {"sgd", 0, {false, false}, sgd},
                                     {"rmsprop", 1, {false, false}, rmsprop},
                                     {"rmsprop_momentum", 2, {false, true}, rmsprop_momentum},
                                     {"nadam", 2, {true, false}, nadam},
                                     {"adamax", 2, {true, false}, adamax},
                                     {"adadelta", 2, {false, false}, adadelta}};

// ---- stochastic rounding

uint64_t split_mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// To a multiple of `unit` (a power of two), upwards if what is cut off and `random` (less than unit) come to
/// a unit. NaN is not rounded.
uint32_t round_bits(float x, uint32_t unit, uint32_t random) {
  if (std::isnan(x)) random = 0;
  const uint64_t sum = static_cast<uint64_t>(as_bits(x)) + random;
  return static_cast<uint32_t>(sum / unit * unit % static_cast<uint64_t>(kTwo32));
}

// ---- 8 bits

double top(bool is_signed) {
  return is_signed ? 1.9375 * 128 - 1 : 1.9375 * 32768 - 1;
}

double scale_of(int exponent) {
  return std::ldexp(1.0, exponent - 127);
}

uint8_t exponent_of(const std::vector<float>& block, bool is_signed) {
  double largest = 0;
  for (const float x : block) {
    if (!std::isfinite(x)) return 255;
    largest = std::max(largest, static_cast<double>(std::fabs(x)));
  }
  int exponent = 1;
  while (top(is_signed) * scale_of(exponent) < largest) ++exponent;
  return static_cast<uint8_t>(exponent);
}

uint8_t encode(float x, int exponent, bool is_signed, uint32_t random12) {
  if (exponent == 255) return 0;
  const float w = std::fma(std::fabs(x), rounded(1 / scale_of(exponent)), 1.0f);
  const int segment = std::ilogb(w);
  const double position = 16 * (segment + (std::ldexp(static_cast<double>(w), -segment) - 1));
  const double down = std::floor(position);
  int code = static_cast<int>(down) + (position - down + (random12 + 0.5) / 4096 >= 1 ? 1 : 0);
  if (!is_signed && code == 0 && x != 0) code = 1;
  return static_cast<uint8_t>(code + (is_signed && std::signbit(x) ? 128 : 0));
}

// ---- one piece

enum class Format { fp32, exact, fp16, compact, eight_bit };
constexpr const char* kFormats[] = {"fp32", "exact", "fp16", "compact", "8bit"};
enum class Gradient { bf16, fp16, fp32 };
constexpr const char* kGradients[] = {"bf16", "fp16", "fp32"};

/// The place of `name` among `names`; -1: it is none of them.
int place_of(const char* name, std::span<const char* const> names) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (std::strcmp(names[i], name) == 0) return static_cast<int>(i);
  }
  return -1;
}

struct Piece {
  const Optimizer& optimizer;
  Format format;
  void* const* components;
  Gradient gradient;
  const void* grad;
  int64_t elements;
  const double* hyper;
  int64_t step;
  float grad_scale;
  uint64_t seed;
  int64_t index;

  template <class T>
  T& at(int component, int64_t i) const {
    return static_cast<T*>(components[component])[i];
  }
  uint32_t noise(int64_t i) const {
    return reference_noise(seed, index + i, step, format == Format::eight_bit);
  }
  int first_state() const { return format == Format::fp32 ? 1 : 2; }

  float gradient_of(int64_t i) const {
    if (gradient == Gradient::fp32) return static_cast<const float*>(grad)[i];
    const uint16_t bits = static_cast<const uint16_t*>(grad)[i];
    return gradient == Gradient::bf16 ? reference_widen(bits) : reference_widen_half(bits);
  }

  float weight(int64_t i) const {
    if (format == Format::fp32) return at<float>(0, i);
    if (format == Format::fp16) return at<float>(1, i);
    const auto lo =
        format == Format::eight_bit ? static_cast<int16_t>(at<int8_t>(1, i) * 256) : at<int16_t>(1, i);
    uint32_t bits;
    reference_join(&at<uint16_t>(0, i), &lo, &bits, 1);
    return as_float(bits);
  }

  void set_weight(int64_t i, float p) const {
    if (format == Format::fp32) {
      at<float>(0, i) = p;
      return;
    }
    if (format == Format::fp16) {
      at<uint16_t>(0, i) = reference_narrow_half(p);
      at<float>(1, i) = p;
      return;
    }
    uint32_t bits = as_bits(p);
    if (format == Format::eight_bit) bits = round_bits(p, 256, noise(i) / 16777216);
    uint16_t hi;
    int16_t lo;
    reference_split(&bits, &hi, &lo, 1);
    at<uint16_t>(0, i) = hi;
    if (format == Format::eight_bit) {
      at<int8_t>(1, i) = static_cast<int8_t>(lo / 256);
    } else {
      at<int16_t>(1, i) = lo;
    }
  }

  uint8_t& code(int k, int64_t i) const { return at<uint8_t>(first_state() + k, i); }
  uint8_t& exponent(int k, int64_t i) const { return code(k, elements + i / 64); }

  float state(int k, int64_t i) const {
    if (format == Format::compact) return reference_widen(at<uint16_t>(first_state() + k, i));
    if (format != Format::eight_bit) return at<float>(first_state() + k, i);
    return reference_decode(code(k, i), exponent(k, i), optimizer.is_signed[k]);
  }

  void update_one(Element& e, int64_t i) const {
    e.p = weight(i);
    e.g = gradient_of(i) * grad_scale;
    optimizer.update(e, hyper, static_cast<double>(step));
    set_weight(i, e.p);
  }

  void update_elements(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      Element e{};
      for (int k = 0; k < optimizer.states; ++k) e.s[k] = state(k, i);
      update_one(e, i);
      for (int k = 0; k < optimizer.states; ++k) {
        if (format == Format::compact) {
          const uint32_t random = k == 0 ? noise(i) % 65536 : noise(i) / 65536;
          at<uint16_t>(first_state() + k, i) =
              static_cast<uint16_t>(round_bits(e.s[k], 65536, random) / 65536);
        } else {
          at<float>(first_state() + k, i) = e.s[k];
        }
      }
    }
  }

  void update_block(int64_t first, int64_t begin, int64_t end) const {
    const int64_t count = std::min<int64_t>(64, elements - first);
    std::vector<std::vector<float>> states(2, std::vector<float>(static_cast<size_t>(count)));
    for (int64_t j = 0; j < count; ++j) {
      Element e{};
      for (int k = 0; k < optimizer.states; ++k) e.s[k] = state(k, first + j);
      if (first + j >= begin && first + j < end) update_one(e, first + j);
      for (int k = 0; k < optimizer.states; ++k)
        states[static_cast<size_t>(k)][static_cast<size_t>(j)] = e.s[k];
    }
    for (int k = 0; k < optimizer.states; ++k) {
      const std::vector<float>& values = states[static_cast<size_t>(k)];
      exponent(k, first) = exponent_of(values, optimizer.is_signed[k]);
      for (int64_t j = 0; j < count; ++j) {
        const uint32_t random = noise(first + j) / (k == 0 ? 1 : 4096) % 4096;
        code(k, first + j) =
            encode(values[static_cast<size_t>(j)], exponent(k, first), optimizer.is_signed[k], random);
      }
    }
  }
};

}  // namespace

int reference_update(const char* optimizer, const char* format, void* const* components, const char* gradient,
                     const void* grad, int64_t elements, int64_t begin, int64_t end, const double* hyper,
                     int64_t step, double grad_scale, uint64_t seed, int64_t index) {
  const int in_format = place_of(format, kFormats), of_gradient = place_of(gradient, kGradients);
  if (in_format < 0 || of_gradient < 0) return 0;
  for (const Optimizer& known : kOptimizers) {
    if (std::strcmp(known.name, optimizer) != 0) continue;
    const Piece piece{known,
                      Format{in_format},
                      components,
                      Gradient{of_gradient},
                      grad,
                      elements,
                      hyper,
                      step,
                      rounded(grad_scale),
                      seed,
                      index};
    if (piece.format != Format::eight_bit) {
      piece.update_elements(begin, end);
    } else {
      for (int64_t first = begin / 64 * 64; first < end; first += 64) piece.update_block(first, begin, end);
    }
    return 1;
  }
  return 0;
}

int reference_is_signed(const char* optimizer, int state) {
  for (const Optimizer& known : kOptimizers)
    if (std::strcmp(known.name, optimizer) == 0) return known.is_signed[state] ? 1 : 0;
  return 0;
}

float reference_widen_half(uint16_t fp16) {
  const int exponent = fp16 / 1024 % 32, mantissa = fp16 % 1024;
  const float sign = fp16 >= 32768 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

uint16_t reference_narrow_half(float x) {
  const int sign = std::signbit(x) ? 32768 : 0;
  if (std::isnan(x)) return static_cast<uint16_t>(sign + 0x7E00);
  const double magnitude = std::fabs(x);
  if (magnitude >= 65520) return static_cast<uint16_t>(sign + 0x7C00);
  const int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // to even
  return static_cast<uint16_t>(sign + (exponent + 14) * 1024 + steps);  // 1024 steps carry into the exponent
}

uint32_t reference_noise(uint64_t seed, int64_t index, int64_t step, int eight_bit) {
  const auto upper = static_cast<uint64_t>(index / kTwo32);
  const uint64_t key = split_mix(split_mix(seed) ^ upper);
  const auto modulo = [](uint64_t x) { return x % static_cast<uint64_t>(kTwo32); };
  uint64_t x = modulo(static_cast<uint64_t>(index)) ^ modulo(key);
  x = modulo((x ^ (x / 65536)) * 0x7FEB352D);
  x = modulo(x + key / static_cast<uint64_t>(kTwo32));
  x = modulo((x ^ (x / 32768)) * 0x846CA68B);
  x ^= x / 65536;
  const uint64_t golden = modulo(static_cast<uint64_t>(step) * 0x9E3779B9u);
  const auto leading = [&](int bits) { return golden / (uint64_t{1} << (32 - bits)); };
  const uint64_t fields = eight_bit != 0 ? leading(12) + leading(12) * 4096 + leading(8) * 16777216
                                         : leading(16) + leading(16) * 65536;
  return static_cast<uint32_t>(modulo(x + fields));
}

float reference_decode(uint8_t code, uint8_t exponent, int is_signed) {
  if (exponent == 255) return NAN;
  if (exponent == 0) return code > 127 && is_signed != 0 ? -0.0f : 0.0f;
  const int magnitude = is_signed != 0 ? code % 128 : code;
  const double w = std::ldexp(1 + magnitude % 16 / 16.0, magnitude / 16);
  const float x = rounded((w - 1) * scale_of(exponent));
  return is_signed != 0 && code >= 128 ? -x : x;
}
