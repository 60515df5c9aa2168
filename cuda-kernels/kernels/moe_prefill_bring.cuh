// The warps that bring operands to the rings of a prefill block. One brings the weights of the base and
// looks for deltas; three bring tokens, and both operands of the deltas.
//
// Nothing here can wait for ever. Blocks do not wait for each other. Within one, let positions count the
// stages of all works, base and deltas, in order; a stage is brought to position p of a ring when p - n has
// been released (n stages in the ring), and released in order once both operands of it are there. The warp
// of the weights is held up at kBegun alone, where all in front of the work is brought, or about to be by
// those that then arrive; the others at kFound alone, which that warp reaches after less than a ring of
// the work's weights, for which releases in front of the work suffice. A barrier tells neighbouring phases
// apart and no others, so each who waits takes every position of a ring in turn.
#pragma once

#include "kernels/moe_prefill_block.cuh"

namespace amphora {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Shape, bool kGateUp>
struct PrefillBring {
  using Block = PrefillBlock<Shape, kGateUp>;
  using Shared = typename Block::Shared;
  static constexpr int kRowBytes = Block::kRowBytes;

  const MoePrefillArgs& args;
  const Shared& shared;
  int thread;
  typename Block::WeightRing weights;
  typename Block::TokenRing tokens;
  // A thread copies one piece of every kEach-th token. Where its rows of x start, in bytes; and where in
  // shared memory they go: the exchange of pieces repeats every other time.
  static constexpr int kEach = Shape::kBring / 8, kOwn = (Shape::kMaxTokens + kEach - 1) / kEach;
  static_assert(kEach % 4 == 0, "the exchange of pieces has two forms");
  unsigned rows[kOwn];
  unsigned places[2];

  // Asks for what base_stage needs of a work.
  __device__ __forceinline__ void prepare(const Work& work) {
    const unsigned pitch = static_cast<unsigned>(args.x_pitch) * kRowBytes;
    const int own = thread / 8, piece = thread % 8;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int n = work.first + min(own + i * kEach, work.count - 1);
      rows[i] = (kGateUp ? args.perm[n] / args.top_k : n) * pitch + piece * 16;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) places[i] = own * kOperandRow + ((piece ^ ((own + i * kEach) & 7)) << 4);
  }

  // Tokens of 64 of k from k0 on.
  __device__ __forceinline__ void copy_tokens(unsigned to, int count, int k0) const {
    const int own = thread / 8, left = Block::k(args) - k0;
    const char* x = static_cast<const char*>(args.x) + static_cast<long long>(k0) * kRowBytes;
    const unsigned even = to + places[0], odd = to + places[1];
    if (left >= kOperandK) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (own + i * kEach < count) copy16((i % 2 ? odd : even) + i * kEach * kOperandRow, x + rows[i]);
      }
    } else {  // beyond k there are zeros
      const bool there = thread % 8 * 8 < left;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (own + i * kEach < count) {
          copy16((i % 2 ? odd : even) + i * kEach * kOperandRow, there ? x + rows[i] : x, there);
        }
      }
    }
  }

  __device__ __forceinline__ void base_stage(const Work& work, int step, int deltas) {
    const int stage = tokens.stage;
    barrier_wait(shared.tokens_empty(stage), tokens.parity ^ 1);
    if (thread == 0) {
      shared.info(stage)[2] = deltas;
      barrier_arrive(shared.tokens_full(stage));
    }
    copy_tokens(shared.tokens(stage), work.count, step * kOperandK);
    // The stage counts as full when the copies of all threads have landed.
    copies_arrive(shared.tokens_full(stage));
    tokens.step();
    weights.step();  // which another warp brings
  }

  // Step `index` of a delta: B in the first halves of the weights' rows, the shrunk numbers in the tokens'
  // rows, zeros where a window that the slot meets has tokens of others.
  __device__ __forceinline__ void delta_stage(const Work& work, const Delta& delta, int index) {
    const int stage = tokens.stage;
    barrier_wait(shared.tokens_empty(stage), tokens.parity ^ 1);
    barrier_wait(shared.weights_empty(weights.stage), weights.parity ^ 1);
    const int low = delta.low, high = delta.high;
    if (thread == 0) {
      shared.info(stage)[0] = low | high << 16;
      barrier_arrive(shared.tokens_full(stage));
      barrier_arrive(shared.weights_full(weights.stage));  // B counts with the tokens
    }
    const auto [part, step] = delta_step(delta, index);
    {
      const int piece = thread % 4, size = 8 * delta.rank[part], at = step * kDeltaRank + piece * 8;
      const char* arena = static_cast<const char*>(args.arena);
      const char* from[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        from[half] = arena + static_cast<long long>(delta.b[kGateUp ? half : 0]) * kArenaUnit +
                     at * kRowBytes;
      }
      constexpr int kRowsEach = Shape::kBring / 4;
#pragma unroll
      for (int i = 0; i < (Shape::kUnits * 64 + kRowsEach - 1) / kRowsEach; ++i) {
        const int r = thread / 4 + i * kRowsEach;
        if (r >= work.units * 64) break;
        const DeltaRow row = delta_row<kGateUp>(args, delta, work.unit, r, part);
        const bool there = row.there && at < size;
        copy16(shared.weights(weights.stage) + swizzled(r, piece),
               there ? from[row.block] + static_cast<long long>(row.row) * size * kRowBytes : arena,
               there);
      }
    }
    const int piece = thread % 8;
    const char* shrunk = static_cast<const char*>(args.shrunk) +
                         static_cast<long long>(work.first) * kShrunkRow +
                         (part * kDeltaSteps + step) * kShrunkStep + piece * 16;
    const int end = min((high + kDeltaWindow - 1) / kDeltaWindow * kDeltaWindow, Shape::kMaxTokens);
    for (int n = low / kDeltaWindow * kDeltaWindow + thread / 8; n < end; n += kEach) {
      const bool own = n >= low && n < high;
      copy16(shared.tokens(stage) + swizzled(n, piece),
             shrunk + static_cast<long long>(own ? n : low) * kShrunkRow, own);
    }
    copies_arrive(shared.tokens_full(stage));
    tokens.step();
    weights.step();
  }

  __device__ __forceinline__ bool with_deltas() const { return args.lora_tile_count > 0; }
  // Named barriers: the threads that bring tokens have begun a work, for the warp that brings weights; it
  // has the work's deltas, for them; and among themselves.
  static constexpr int kBegun = 1, kFound = 2, kAmong = 3, kAll = Shape::kBring + kWarp;
  __device__ __forceinline__ Walk<Shape::kMaxTokens> walk(const ExpertTables& tables) const {
    return Walk<Shape::kMaxTokens>(tables, Block::grains(args), Shape::kUnits / Block::kGrain, blockIdx.x,
                                   gridDim.x);
  }
  // Whether two works have one tile of tokens, hence the same deltas: most neighbours do.
  static __device__ __forceinline__ bool same_tokens(const Work& one, const Work& other) {
    return one.expert == other.expert && one.first == other.first;
  }
  // A work in units.
  __device__ __forceinline__ bool next(Walk<Shape::kMaxTokens>& walk, Work& work) const {
    if (!walk.next(work)) return false;
    work.unit *= Block::kGrain;
    work.units = min(work.units * Block::kGrain, prefill_units<kGateUp>(args) - work.unit);
    return true;
  }

  // The threads that bring tokens and deltas.
  __device__ void run(const ExpertTables& tables) {
    const int steps = Block::steps(args);
    auto walk = this->walk(tables);
    Work work, before{-1, 0, 0, 0, 0};
    DeltaCount found{0, 0};
    int number = 0, age = 0;  // works, and works with these tokens in front of this one
    for (; next(walk, work); ++number) {
      const bool fresh = !same_tokens(work, before);
      before = work;
      age = fresh ? 0 : age + 1;
      if (fresh) prepare(work);
      wait_for_work(number);
      if (thread == 0) put_work(number, work);
      if (!kGateUp && age < 2) {  // both places hold them then
        int* index = shared.index(number & 1);
        for (int n = thread; n < work.count; n += Shape::kBring) index[n] = args.perm[work.first + n];
      }
      // The arrival of one thread at the next stage speaks for all.
      named_barrier(kAmong, Shape::kBring);
      const bool look = with_deltas() && fresh;
      if (look) named_barrier_arrive(kBegun, kAll);
      for (int step = 0; step + 1 < steps; ++step) base_stage(work, step, 0);
      if (look) {
        named_barrier(kFound, kAll);
        found = DeltaCount{shared.scratch()[1], shared.scratch()[2]};
      }
      base_stage(work, steps - 1, found.steps);
      for (int i = 0; i < found.deltas; ++i) {
        const Delta delta = shared.deltas()[i];
        for (int step = 0; step < delta.steps; ++step) delta_stage(work, delta, step);
      }
    }
    // A work without tokens ends it.
    wait_for_work(number);
    barrier_wait(shared.tokens_empty(tokens.stage), tokens.parity ^ 1);
    if (thread == 0) {
      put_work(number, Work{0, 0, 0, 0, 0});
      barrier_arrive(shared.tokens_full(tokens.stage));
    }
    barrier_arrive(shared.tokens_full(tokens.stage));
  }

  // The warp that brings weights, and looks for the deltas of new tokens when the first weights are on their
  // way: they must be known by the others' last stage of the base, and the list is free when they have begun.
  // More of the ring first would keep them from beginning it before the work in front is done.
  __device__ void run_weights(const ExpertTables& tables) {
    const int steps = Block::steps(args), lane = threadIdx.x % kWarp;
    auto walk = this->walk(tables);
    Work work, before{-1, 0, 0, 0, 0};
    DeltaCount found{0, 0};
    while (next(walk, work)) {
      const int ahead = min(steps, Shape::kWeightStages / 2);
      for (int step = 0; step < ahead; ++step) weight_stage(work, step, lane);
      if (with_deltas() && !same_tokens(work, before)) {
        named_barrier(kBegun, kAll);
        found = find_deltas<kWarp>(args, tables, work, lane, shared.deltas(), shared.scratch(),
                                   [] { __syncwarp(); });
        if (lane == 0) {
          shared.scratch()[1] = found.deltas;
          shared.scratch()[2] = found.steps;
        }
        named_barrier_arrive(kFound, kAll);
      }
      before = work;
      for (int step = ahead; step < steps; ++step) weight_stage(work, step, lane);
      // The others fill these. Each is waited for in its turn: a wait tells neighbouring phases apart, and
      // no others.
      for (int step = 0; step < found.steps; ++step) {
        barrier_wait(shared.weights_empty(weights.stage), weights.parity ^ 1);
        weights.step();
      }
    }
  }

  __device__ __forceinline__ void weight_stage(const Work& work, int step, int lane) {
    const int stage = weights.stage;
    barrier_wait(shared.weights_empty(stage), weights.parity ^ 1);
    if (lane == 0) {
      // A delta's copies may have been in this place.
      if (with_deltas()) async_proxy_fence();
      Barrier* full = shared.weights_full(stage);
      barrier_expect(full, work.units * kGroupBytes);
      for (int i = 0; i < work.units; ++i) {
        const unsigned to = shared.weights(stage) + i * kGroupBytes;
        if constexpr (kGateUp) {
          load_box(to, &args.map, full, step * kOperandK, 0, 0, (work.unit + i) * 4, work.expert);
        } else {
          load_box(to, &args.map, full, step * kOperandK, (work.unit + i) * 64, work.expert);
        }
      }
    }
    __syncwarp();
    weights.step();
  }

  // Those that multiply have read what lay in the place of work `number`: the one two before.
  __device__ __forceinline__ void wait_for_work(int number) {
    if (number >= 2) barrier_wait(shared.done(number & 1), (number / 2 - 1) & 1);
  }
  __device__ __forceinline__ void put_work(int number, const Work& work) {
    volatile Work* to = shared.work(number & 1);
    to->expert = work.expert;
    to->unit = work.unit;
    to->units = work.units;
    to->first = work.first;
    to->count = work.count;
  }
};

#endif

}  // namespace amphora
