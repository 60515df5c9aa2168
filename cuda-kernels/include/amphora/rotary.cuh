// How a piece of a head's half turns against that of the other half: one formula for both rotary kernels, and so
// the same bits of a row.
#pragma once

#include "amphora/dtype.cuh"
#include "amphora/octet.cuh"

namespace amphora {

// The angles of one piece of a head's half.
template <class Element>
struct RopeAngles {
  static constexpr int kElements = Vector<Element>::kElements;
  float cosine[kElements], sine[kElements];

  // Of a row of the table: cosines of all pairs of a half, then their sines.
  __device__ __forceinline__ RopeAngles(const float* angles, int at, int half) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      cosine[i] = angles[at + i];
      sine[i] = angles[half + at + i];
    }
  }

  // The same of a row that lies on 16 bytes.
  __device__ __forceinline__ RopeAngles(const float4* row, int at, int half) {
    const float* angles = reinterpret_cast<const float*>(row);
#pragma unroll
    for (int i = 0; i < kElements; i += 4) {
      const float4 first = *reinterpret_cast<const float4*>(angles + at + i);
      const float4 second = *reinterpret_cast<const float4*>(angles + half + at + i);
      cosine[i] = first.x, cosine[i + 1] = first.y, cosine[i + 2] = first.z, cosine[i + 3] = first.w;
      sine[i] = second.x, sine[i + 1] = second.y, sine[i + 2] = second.z, sine[i + 3] = second.w;
    }
  }

  __device__ __forceinline__ void turn(Vector<Element>& first, Vector<Element>& second, float scale) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float a = widen(first.of[i]), b = widen(second.of[i]);
      first.of[i] = narrow<Element>((a * cosine[i] - b * sine[i]) * scale);
      second.of[i] = narrow<Element>((b * cosine[i] + a * sine[i]) * scale);
    }
  }
};

}  // namespace amphora
