// Views of global memory and of UB.
#pragma once

#include "core.h"

namespace AscendC {

template <typename T>
class GlobalTensor {
public:
    void SetGlobalBuffer(T *address)
    {
        address_ = address;
    }

    void SetGlobalBuffer(T *address, uint64_t elements)
    {
        address_ = address;
        elements_ = elements;
    }

    GlobalTensor operator[](uint64_t offset) const
    {
        GlobalTensor part;
        part.address_ = address_ + offset;
        part.elements_ = elements_ == kUnsized ? kUnsized : elements_ - offset;
        return part;
    }

    // Garbage on the device unless the size was given, so a fault here.
    uint64_t GetSize() const
    {
        if (elements_ == kUnsized) {
            Break("GlobalTensor::GetSize of a tensor that was given no size");
        }
        return elements_;
    }

    T GetValue(uint64_t index) const
    {
        ThisCore().Global(address_ + index, sizeof(T), "GlobalTensor::GetValue");
        return address_[index];
    }

    T *GetPhyAddr() const
    {
        return address_;
    }

private:
    static constexpr uint64_t kUnsized = ~0ull;
    T *address_ = nullptr;
    uint64_t elements_ = kUnsized;
};

template <typename T>
class LocalTensor {
public:
    LocalTensor() = default;
    LocalTensor(uint32_t offset, uint32_t bytes) : offset_(offset), bytes_(bytes)
    {
    }

    LocalTensor operator[](uint32_t elements) const
    {
        if (elements * sizeof(T) > bytes_) {
            Break("element %u of a LocalTensor of %u bytes", elements, bytes_);
        }
        return LocalTensor(offset_ + elements * static_cast<uint32_t>(sizeof(T)),
                           bytes_ - elements * static_cast<uint32_t>(sizeof(T)));
    }

    template <typename U>
    LocalTensor<U> ReinterpretCast() const
    {
        return LocalTensor<U>(offset_, bytes_);
    }

    uint32_t GetSize() const
    {
        return bytes_ / sizeof(T);
    }

    uint32_t GetLength() const
    {
        return bytes_;
    }

    // The scalar unit's access: what a vector or copy instruction wrote needs a flag first.
    T GetValue(uint32_t index) const
    {
        Core &core = ThisCore();
        Hold(index + 1, "LocalTensor::GetValue");
        core.Issue(kScalar);
        core.Read(kScalar, At(index), sizeof(T), "LocalTensor::GetValue");
        T value;
        std::memcpy(&value, &core.ub[At(index)], sizeof(T));
        return value;
    }

    void SetValue(uint32_t index, T value) const
    {
        Core &core = ThisCore();
        Hold(index + 1, "LocalTensor::SetValue");
        core.Issue(kScalar);
        core.Write(kScalar, At(index), sizeof(T), "LocalTensor::SetValue");
        std::memcpy(&core.ub[At(index)], &value, sizeof(T));
    }

    // ---- for the instructions of this header ----

    uint32_t Offset() const
    {
        return offset_;
    }

    T *Data() const
    {
        return reinterpret_cast<T *>(&ThisCore().ub[offset_]);
    }

    void Hold(uint64_t elements, const char *what) const
    {
        if (elements * sizeof(T) > bytes_) {
            Break("%s of %llu elements leaves a LocalTensor of %u bytes", what,
                  static_cast<unsigned long long>(elements), bytes_);
        }
    }

    void Aligned(const char *what) const
    {
        if (offset_ % kUbBlock != 0) {
            Break("%s with a UB operand at byte %u: not a multiple of 32", what, offset_);
        }
    }

private:
    uint32_t At(uint32_t index) const
    {
        return offset_ + index * static_cast<uint32_t>(sizeof(T));
    }

    uint32_t offset_ = 0;
    uint32_t bytes_ = 0;
};

}  // namespace AscendC
