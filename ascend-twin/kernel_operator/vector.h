// Vector instructions in their count form. Operands begin at multiples of 32 bytes.
#pragma once

#include "pipe.h"

namespace AscendC {

// What the 910B's vector unit computes in. half and the integers are left out until a kernel needs them.
template <typename T>
struct VectorArithmetic {
    static constexpr bool value = false;
};
template <>
struct VectorArithmetic<float> {
    static constexpr bool value = true;
};

template <typename T>
constexpr void NeedArithmetic()
{
    static_assert(!std::is_same<T, bfloat16_t>::value,
                  "the 910B has no vector arithmetic in bf16: Cast to float and back");
    static_assert(VectorArithmetic<T>::value, "arithmetic in this type is not modelled");
}

template <typename T>
inline void ReadsVector(const LocalTensor<T> &tensor, int32_t count, const char *what)
{
    if (count <= 0) {
        Break("%s of %d elements", what, count);
    }
    tensor.Aligned(what);
    tensor.Hold(static_cast<uint64_t>(count), what);
    ThisCore().Read(kVector, tensor.Offset(), static_cast<uint32_t>(count) * sizeof(T), what);
}

template <typename T>
inline void WritesVector(const LocalTensor<T> &tensor, int32_t count, const char *what)
{
    if (count <= 0) {
        Break("%s of %d elements", what, count);
    }
    tensor.Aligned(what);
    tensor.Hold(static_cast<uint64_t>(count), what);
    ThisCore().Write(kVector, tensor.Offset(), static_cast<uint32_t>(count) * sizeof(T), what);
}

inline void Convert(const LocalTensor<float> &to, const LocalTensor<half> &from, int32_t count)
{
    for (int32_t i = 0; i < count; ++i) {
        to.Data()[i] = ToFloat(from.Data()[i]);
    }
}

inline void Convert(const LocalTensor<float> &to, const LocalTensor<bfloat16_t> &from, int32_t count)
{
    for (int32_t i = 0; i < count; ++i) {
        to.Data()[i] = ToFloat(from.Data()[i]);
    }
}

template <typename T>
inline void Convert(const LocalTensor<T> &to, const LocalTensor<float> &from, int32_t count)
{
    for (int32_t i = 0; i < count; ++i) {
        FromFloat(from.Data()[i], to.Data()[i]);
    }
}

inline void CheckRounding(const LocalTensor<float> &, RoundMode mode)
{
    if (mode != RoundMode::CAST_NONE) {
        Break("Cast to float widens: only CAST_NONE");
    }
}

inline void CheckRounding(const LocalTensor<bfloat16_t> &, RoundMode mode)
{
    if (mode != RoundMode::CAST_RINT) {
        Break("Cast from float to bf16 has no CAST_NONE, and no mode but CAST_RINT is modelled");
    }
}

inline void CheckRounding(const LocalTensor<half> &, RoundMode mode)
{
    if (mode != RoundMode::CAST_RINT && mode != RoundMode::CAST_NONE) {
        Break("Cast from float to half: no mode but CAST_NONE and CAST_RINT is modelled");
    }
}

template <typename T, typename U>
inline void Cast(const LocalTensor<T> &to, const LocalTensor<U> &from, const RoundMode &mode, uint32_t count)
{
    CheckRounding(to, mode);
    ThisCore().Issue(kVector);
    ReadsVector(from, static_cast<int32_t>(count), "Cast");
    WritesVector(to, static_cast<int32_t>(count), "Cast");
    Convert(to, from, static_cast<int32_t>(count));
}

template <typename T>
inline void Duplicate(const LocalTensor<T> &to, const T &value, int32_t count)
{
    NeedArithmetic<T>();
    ThisCore().Issue(kVector);
    WritesVector(to, count, "Duplicate");
    for (int32_t i = 0; i < count; ++i) {
        to.Data()[i] = value;
    }
}

template <typename T>
inline void Muls(const LocalTensor<T> &to, const LocalTensor<T> &from, const T &factor, const int32_t &count)
{
    NeedArithmetic<T>();
    ThisCore().Issue(kVector);
    ReadsVector(from, count, "Muls");
    WritesVector(to, count, "Muls");
    for (int32_t i = 0; i < count; ++i) {
        to.Data()[i] = from.Data()[i] * factor;
    }
}

template <typename T>
inline void Adds(const LocalTensor<T> &to, const LocalTensor<T> &from, const T &addend, const int32_t &count)
{
    NeedArithmetic<T>();
    ThisCore().Issue(kVector);
    ReadsVector(from, count, "Adds");
    WritesVector(to, count, "Adds");
    for (int32_t i = 0; i < count; ++i) {
        to.Data()[i] = from.Data()[i] + addend;
    }
}

template <typename T>
inline void Add(const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b, const int32_t &count)
{
    NeedArithmetic<T>();
    ThisCore().Issue(kVector);
    ReadsVector(a, count, "Add");
    ReadsVector(b, count, "Add");
    WritesVector(to, count, "Add");
    for (int32_t i = 0; i < count; ++i) {
        to.Data()[i] = a.Data()[i] + b.Data()[i];
    }
}

template <typename T>
inline void Mul(const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b, const int32_t &count)
{
    NeedArithmetic<T>();
    ThisCore().Issue(kVector);
    ReadsVector(a, count, "Mul");
    ReadsVector(b, count, "Mul");
    WritesVector(to, count, "Mul");
    for (int32_t i = 0; i < count; ++i) {
        to.Data()[i] = a.Data()[i] * b.Data()[i];
    }
}

// to += from · factor, the product rounded first.
template <typename T>
inline void Axpy(const LocalTensor<T> &to, const LocalTensor<T> &from, const T &factor, const int32_t &count)
{
    NeedArithmetic<T>();
    ThisCore().Issue(kVector);
    ReadsVector(from, count, "Axpy");
    ReadsVector(to, count, "Axpy");
    WritesVector(to, count, "Axpy");
    for (int32_t i = 0; i < count; ++i) {
        to.Data()[i] = to.Data()[i] + from.Data()[i] * factor;
    }
}

// The total in to[0]. Halves are added pairwise, as the hardware's tree does; its last bits differ.
template <typename T>
inline void ReduceSum(const LocalTensor<T> &to, const LocalTensor<T> &from, const LocalTensor<T> &work,
                      int32_t count)
{
    NeedArithmetic<T>();
    ThisCore().Issue(kVector);
    ReadsVector(from, count, "ReduceSum");
    WritesVector(work, count, "ReduceSum");
    WritesVector(to, 1, "ReduceSum");
    T *sums = work.Data();
    std::memmove(sums, from.Data(), static_cast<size_t>(count) * sizeof(T));
    for (int32_t left = count; left > 1; left = (left + 1) / 2) {
        const int32_t upper = (left + 1) / 2;
        for (int32_t i = 0; i + upper < left; ++i) {
            sums[i] += sums[i + upper];
        }
    }
    to.Data()[0] = sums[0];
}

}  // namespace AscendC
