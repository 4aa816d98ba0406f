// Arithmetic on NCCL's data types, for the small tensors whose values ranks exchange.
#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace nullgpu {
namespace {

constexpr size_t SIZES[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Small floating-point formats: a sign, `exponent` bits and `fraction` bits. bfloat16 is (8, 7), half (5, 10), E5M2
// (5, 2), E4M3 (4, 3). The last has no infinities, and its only NaN has all bits of exponent and fraction set.
bool is_e4m3(int exponent) { return exponent == 4; }
double decode(uint32_t bits, int exponent, int fraction) {
    int bias = (1 << (exponent - 1)) - 1, top = (1 << exponent) - 1;
    int sign = int(bits >> (exponent + fraction)) & 1, power = int(bits >> fraction) & top;
    double part = double(bits & ((1u << fraction) - 1)) / double(1 << fraction);
    bool is_nan = part == double((1 << fraction) - 1) / double(1 << fraction);
    bool special = power == top && (!is_e4m3(exponent) || is_nan);
    double value = special ? (part != 0 ? NAN : INFINITY)
                   : power ? std::ldexp(1 + part, power - bias)
                           : std::ldexp(part, 1 - bias);
    return sign ? -value : value;
}
uint32_t encode(double value, int exponent, int fraction) {
    int bias = (1 << (exponent - 1)) - 1, top = (1 << exponent) - 1;
    uint32_t sign = uint32_t(std::signbit(value)) << (exponent + fraction);
    uint32_t infinity = uint32_t(top) << fraction;
    if (std::isnan(value)) return sign | infinity | ((1u << fraction) - 1);
    value = std::fabs(value);
    if (value == 0) return sign;
    int power;
    std::frexp(value, &power);
    power = std::max(power - 1, 1 - bias);
    // The encoding grows with the value, so rounding up into the next power of two needs no care.
    double scaled = std::nearbyint(std::ldexp(value, fraction - power));
    double whole = scaled + std::ldexp(double(power + bias - 1), fraction);
    uint32_t largest = is_e4m3(exponent) ? infinity + 6 : infinity;  // 448: conversions to E4M3 saturate
    return sign | (whole >= largest ? largest : uint32_t(whole));
}

double load(const void *at, int type) {
    uint16_t two;
    uint8_t one;
    switch (type) {
        case HALF: memcpy(&two, at, 2); return decode(two, 5, 10);
        case BFLOAT16: memcpy(&two, at, 2); return double(float_of(uint32_t(two) << 16));
        case FLOAT8_E4M3: memcpy(&one, at, 1); return decode(one, 4, 3);
        case FLOAT8_E5M2: memcpy(&one, at, 1); return decode(one, 5, 2);
        case FLOAT: { float value; memcpy(&value, at, 4); return double(value); }
        default: { double value; memcpy(&value, at, 8); return value; }
    }
}
void store(void *at, double value, int type) {
    uint16_t two;
    uint8_t one;
    switch (type) {
        case HALF: two = uint16_t(encode(value, 5, 10)); memcpy(at, &two, 2); return;
        case BFLOAT16: two = uint16_t(encode(value, 8, 7)); memcpy(at, &two, 2); return;
        case FLOAT8_E4M3: one = uint8_t(encode(value, 4, 3)); memcpy(at, &one, 1); return;
        case FLOAT8_E5M2: one = uint8_t(encode(value, 5, 2)); memcpy(at, &one, 1); return;
        case FLOAT: { float single = float(value); memcpy(at, &single, 4); return; }
        default: memcpy(at, &value, 8); return;
    }
}

template <typename Number>
Number combined(Number a, Number b, int operation) {
    switch (operation) {
        case PRODUCT: return Number(a * b);
        case MAXIMUM: return std::max(a, b);
        case MINIMUM: return std::min(a, b);
        default: return Number(a + b);
    }
}

template <typename Integer>
void reduce_integers(void *to, const std::vector<const void *> &sources, size_t count, int operation, double scale) {
    auto number = [](const void *source, size_t i) {
        Integer value;
        memcpy(&value, static_cast<const char *>(source) + i * sizeof value, sizeof value);
        return value;
    };
    for (size_t i = 0; i < count; i++) {
        Integer total = number(sources[0], i);
        for (size_t s = 1; s < sources.size(); s++) total = combined(total, number(sources[s], i), operation);
        if (operation == AVERAGE) total = Integer(total / Integer(sources.size()));
        if (operation >= CUSTOM) total = Integer(double(total) * scale);
        memcpy(static_cast<char *>(to) + i * sizeof total, &total, sizeof total);
    }
}

void reduce_floats(void *to, const std::vector<const void *> &sources, size_t count, int type, int operation, double scale) {
    size_t size = SIZES[type];
    auto number = [&](const void *source, size_t i) { return load(static_cast<const char *>(source) + i * size, type) * scale; };
    for (size_t i = 0; i < count; i++) {
        double total = number(sources[0], i);
        for (size_t s = 1; s < sources.size(); s++) total = combined(total, number(sources[s], i), operation);
        if (operation == AVERAGE) total /= double(sources.size());
        store(static_cast<char *>(to) + i * size, total, type);
    }
}

}  // namespace

bool is_type(int type) { return type >= 0 && type < TYPES; }
size_t size_of(int type) { return SIZES[type]; }

double number_at(const void *at, int type) { return load(at, type); }

void reduce(void *to, const std::vector<const void *> &sources, size_t count, int type, int operation, double scale) {
    switch (type) {
        case INT8: return reduce_integers<int8_t>(to, sources, count, operation, scale);
        case UINT8: return reduce_integers<uint8_t>(to, sources, count, operation, scale);
        case INT32: return reduce_integers<int32_t>(to, sources, count, operation, scale);
        case UINT32: return reduce_integers<uint32_t>(to, sources, count, operation, scale);
        case INT64: return reduce_integers<int64_t>(to, sources, count, operation, scale);
        case UINT64: return reduce_integers<uint64_t>(to, sources, count, operation, scale);
        default: return reduce_floats(to, sources, count, type, operation, scale);
    }
}

}  // namespace nullgpu
