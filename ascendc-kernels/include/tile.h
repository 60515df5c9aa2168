// What kernels share: copies with tails, widening to f32, and one-line waits between pipes.
//
// Global addresses and lengths need no alignment here (DataCopyPad), local ones are multiples of 32
// bytes. Between dependent vector instructions the compiler's auto-sync stands (the kernels are
// built with it); between pipes every wait is written out.
#pragma once

#include "kernel_operator.h"

namespace amphora {

template <typename A, typename B>
struct Same {
    static constexpr bool value = false;
};
template <typename A>
struct Same<A, A> {
    static constexpr bool value = true;
};

__aicore__ inline uint32_t CeilDiv(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

__aicore__ inline uint32_t Min(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

// The second pipe of the event waits for all that the first has been given so far.
template <AscendC::HardEvent event>
__aicore__ inline void Wait(AscendC::TPipe &pipe)
{
    const int32_t id = static_cast<int32_t>(pipe.FetchEventID(event));
    AscendC::SetFlag<event>(id);
    AscendC::WaitFlag<event>(id);
}

// `count` elements from global memory, no alignment wanted there; what pads the last block of 32
// bytes is not defined and is not read.
template <typename T>
__aicore__ inline void CopyIn(const AscendC::LocalTensor<T> &to, const AscendC::GlobalTensor<T> &from,
                              uint32_t count)
{
    const AscendC::DataCopyExtParams shape{1, count * static_cast<uint32_t>(sizeof(T)), 0, 0, 0};
    const AscendC::DataCopyPadExtParams<T> pad{};
    AscendC::DataCopyPad(to, from, shape, pad);
}

template <typename T>
__aicore__ inline void CopyOut(const AscendC::GlobalTensor<T> &to, const AscendC::LocalTensor<T> &from,
                               uint32_t count)
{
    const AscendC::DataCopyExtParams shape{1, count * static_cast<uint32_t>(sizeof(T)), 0, 0, 0};
    AscendC::DataCopyPad(to, from, shape);
}

// Exact. There is no vector arithmetic in bf16, and sums are f32 in any case.
template <typename T>
__aicore__ inline void Widen(const AscendC::LocalTensor<float> &to, const AscendC::LocalTensor<T> &from,
                             uint32_t count)
{
    if constexpr (Same<T, float>::value) {
        AscendC::Muls(to, from, 1.0f, static_cast<int32_t>(count));
    } else {
        AscendC::Cast(to, from, AscendC::RoundMode::CAST_NONE, count);
    }
}

// The one rounding of a result: nearest, ties to even.
template <typename T>
__aicore__ inline void Narrow(const AscendC::LocalTensor<T> &to, const AscendC::LocalTensor<float> &from,
                              uint32_t count)
{
    if constexpr (Same<T, float>::value) {
        AscendC::Muls(to, from, 1.0f, static_cast<int32_t>(count));
    } else {
        AscendC::Cast(to, from, AscendC::RoundMode::CAST_RINT, count);
    }
}

}  // namespace amphora
