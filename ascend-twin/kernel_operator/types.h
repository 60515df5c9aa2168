// Element types as the device has them, rounding modes, positions and events.
#pragma once

#include <cstdint>
#include <cstring>

// Storage types: conversions only. The scalar unit of our kernels computes in float.
struct half {
    uint16_t bits = 0;
    half() = default;
    half(int value) : bits(0)
    {
        (void)value;  // Only zero is ever written: padding values.
    }
};

struct bfloat16_t {
    uint16_t bits = 0;
    bfloat16_t() = default;
    bfloat16_t(int value) : bits(0)
    {
        (void)value;
    }
};

namespace AscendC {

enum class RoundMode { CAST_NONE = 0, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };

enum class TPosition : uint8_t {
    GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC
};
using QuePosition = TPosition;

// The pipes of a vector core.
enum Pipe : uint8_t { kScalar, kVector, kIn, kOut, kPipes };

enum class HardEvent : uint8_t {
    MTE2_V, V_MTE2, V_MTE3, MTE3_V, MTE3_MTE2, MTE2_MTE3, S_V, V_S, S_MTE2, MTE2_S, S_MTE3, MTE3_S, COUNT
};

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };

using TEventID = int8_t;

struct EventPipes {
    Pipe from;
    Pipe to;
};

inline EventPipes PipesOf(HardEvent event)
{
    switch (event) {
        case HardEvent::MTE2_V: return {kIn, kVector};
        case HardEvent::V_MTE2: return {kVector, kIn};
        case HardEvent::V_MTE3: return {kVector, kOut};
        case HardEvent::MTE3_V: return {kOut, kVector};
        case HardEvent::MTE3_MTE2: return {kOut, kIn};
        case HardEvent::MTE2_MTE3: return {kIn, kOut};
        case HardEvent::S_V: return {kScalar, kVector};
        case HardEvent::V_S: return {kVector, kScalar};
        case HardEvent::S_MTE2: return {kScalar, kIn};
        case HardEvent::MTE2_S: return {kIn, kScalar};
        case HardEvent::S_MTE3: return {kScalar, kOut};
        default: return {kOut, kScalar};
    }
}

// ---- conversions, nearest with ties to even where they round --------------------------------

inline float BitsToFloat(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t FloatToBits(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float ToFloat(float value)
{
    return value;
}

inline float ToFloat(bfloat16_t value)
{
    return BitsToFloat(static_cast<uint32_t>(value.bits) << 16);
}

inline float ToFloat(half value)
{
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t exponent = (value.bits >> 10) & 0x1fu;
    const uint32_t fraction = value.bits & 0x3ffu;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * BitsToFloat(0x33800000u);  // 2^-24
        return sign != 0 ? -magnitude : magnitude;
    }
    if (exponent == 31) {
        return BitsToFloat(sign | 0x7f800000u | (fraction << 13));
    }
    return BitsToFloat(sign | ((exponent + 112) << 23) | (fraction << 13));
}

inline void FromFloat(float value, bfloat16_t &out)
{
    const uint32_t bits = FloatToBits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        out.bits = static_cast<uint16_t>((bits >> 16) | 0x40u);
        return;
    }
    out.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void FromFloat(float value, half &out)
{
    const uint32_t bits = FloatToBits(value);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        out.bits = static_cast<uint16_t>(sign | 0x7e00u);
    } else if (magnitude >= 0x477ff000u) {
        out.bits = static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
    } else if (magnitude < 0x38800000u) {
        // Below 2^-14 the result counts units of 2^-24: the float adder rounds to them.
        const float shifted = BitsToFloat(magnitude) + BitsToFloat(0x3f000000u);  // + 0.5
        out.bits = static_cast<uint16_t>(sign | (FloatToBits(shifted) - 0x3f000000u));
    } else {
        const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
        out.bits = static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
    }
}

}  // namespace AscendC
