// Copies between global memory and UB. Each runs on MTE2 (in) or MTE3 (out).
#pragma once

#include "pipe.h"

namespace AscendC {

// blockLen in bytes; the stride on the UB side in blocks of 32 bytes, on the global side in bytes.
struct DataCopyExtParams {
    uint16_t blockCount = 0;
    uint32_t blockLen = 0;
    uint32_t srcStride = 0;
    uint32_t dstStride = 0;
    uint32_t rsv = 0;

    DataCopyExtParams() = default;
    DataCopyExtParams(uint16_t count, uint32_t len, uint32_t src, uint32_t dst, uint32_t reserved)
        : blockCount(count), blockLen(len), srcStride(src), dstStride(dst), rsv(reserved)
    {
    }
};

template <typename T>
struct DataCopyPadExtParams {
    bool isPad = false;
    uint8_t leftPadding = 0;
    uint8_t rightPadding = 0;
    T paddingValue = 0;

    DataCopyPadExtParams() = default;
    DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
        : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value)
    {
    }
};

inline uint32_t PaddedBlock(uint32_t bytes)
{
    return (bytes + kUbBlock - 1) / kUbBlock * kUbBlock;
}

inline void CheckShape(const DataCopyExtParams &shape, uint32_t element)
{
    if (shape.blockCount == 0 || shape.blockCount > 4095 || shape.blockLen == 0 || shape.blockLen > 2097151 ||
        shape.blockLen % element != 0) {
        Break("DataCopyPad of %u blocks of %u bytes", shape.blockCount, shape.blockLen);
    }
}

template <typename T>
inline void DataCopyPad(const LocalTensor<T> &to, const GlobalTensor<T> &from, const DataCopyExtParams &shape,
                        const DataCopyPadExtParams<T> &pad)
{
    Core &core = ThisCore();
    CheckShape(shape, sizeof(T));
    if (pad.isPad || pad.leftPadding != 0 || pad.rightPadding != 0) {
        Break("DataCopyPad with padding is not modelled");
    }
    to.Aligned("DataCopyPad");
    core.Issue(kIn);
    const uint32_t pitch = PaddedBlock(shape.blockLen) + shape.dstStride * kUbBlock;
    const uint8_t *source = reinterpret_cast<const uint8_t *>(from.GetPhyAddr());
    for (uint32_t i = 0; i < shape.blockCount; ++i) {
        const uint64_t end = static_cast<uint64_t>(i) * pitch + PaddedBlock(shape.blockLen);
        to.Hold((end + sizeof(T) - 1) / sizeof(T), "DataCopyPad");
        core.Global(source, shape.blockLen, "DataCopyPad");
        core.Write(kIn, to.Offset() + i * pitch, shape.blockLen, "DataCopyPad");
        std::memcpy(&core.ub[to.Offset() + i * pitch], source, shape.blockLen);
        source += shape.blockLen + shape.srcStride;
    }
}

template <typename T>
inline void DataCopyPad(const GlobalTensor<T> &to, const LocalTensor<T> &from, const DataCopyExtParams &shape)
{
    Core &core = ThisCore();
    CheckShape(shape, sizeof(T));
    from.Aligned("DataCopyPad");
    core.Issue(kOut);
    const uint32_t pitch = PaddedBlock(shape.blockLen) + shape.srcStride * kUbBlock;
    uint8_t *target = reinterpret_cast<uint8_t *>(to.GetPhyAddr());
    for (uint32_t i = 0; i < shape.blockCount; ++i) {
        from.Hold((static_cast<uint64_t>(i) * pitch + shape.blockLen) / sizeof(T), "DataCopyPad");
        core.Global(target, shape.blockLen, "DataCopyPad");
        core.Read(kOut, from.Offset() + i * pitch, shape.blockLen, "DataCopyPad");
        std::memcpy(target, &core.ub[from.Offset() + i * pitch], shape.blockLen);
        target += shape.blockLen + shape.dstStride;
    }
}

template <typename T>
inline void CheckPlainCopy(const LocalTensor<T> &local, uint32_t count)
{
    if (count == 0 || count * sizeof(T) % kUbBlock != 0) {
        Break("DataCopy of %u elements: %zu bytes are no multiple of 32", count, count * sizeof(T));
    }
    local.Aligned("DataCopy");
    local.Hold(count, "DataCopy");
}

template <typename T>
inline void DataCopy(const LocalTensor<T> &to, const GlobalTensor<T> &from, uint32_t count)
{
    Core &core = ThisCore();
    CheckPlainCopy(to, count);
    core.Issue(kIn);
    core.Global(from.GetPhyAddr(), count * sizeof(T), "DataCopy");
    core.Write(kIn, to.Offset(), count * sizeof(T), "DataCopy");
    std::memcpy(to.Data(), from.GetPhyAddr(), count * sizeof(T));
}

template <typename T>
inline void DataCopy(const GlobalTensor<T> &to, const LocalTensor<T> &from, uint32_t count)
{
    Core &core = ThisCore();
    CheckPlainCopy(from, count);
    core.Issue(kOut);
    core.Global(to.GetPhyAddr(), count * sizeof(T), "DataCopy");
    core.Read(kOut, from.Offset(), count * sizeof(T), "DataCopy");
    std::memcpy(to.GetPhyAddr(), from.Data(), count * sizeof(T));
}

}  // namespace AscendC
