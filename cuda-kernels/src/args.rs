//! The argument structs of `args.h`, field by field. Sizes and offsets are asserted here and, with the
//! same numbers, in `args_layout.h`: a struct that differs on one side compiles on neither.

/// An address in device memory; null where an optional operand is absent.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// An absent operand.
    pub const NULL: DevicePtr = DevicePtr(0);
}

/// A tensor map, as the driver writes it: how the copy engine finds boxes of a tensor.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TensorMap(pub [u64; 16]);

/// Slices of one projection that a kernel takes.
pub const MAX_SLICES: usize = 4;
/// The largest rank class.
pub const MAX_RANK: usize = 256;

/// Logits of a row that one block looks at.
pub const LOGIT_CHUNK: usize = 8192;

/// Vectors that a group of lanes of `rms_norm_short` takes.
pub const SHORT_VECTORS: usize = 4;

/// Most candidates of a row that draws.
pub const MOST_CANDIDATES: usize = 2048;

/// Most likely tokens that a row of log-probabilities has room for.
pub const MOST_BEST: usize = 20;

/// A struct that a kernel takes as its only parameter.
pub trait Args: Copy {
    /// The struct's name in C.
    const NAME: &'static str;
    /// Fields and their offsets, for checking the C side's assertions.
    const FIELDS: &'static [(&'static str, usize)];
}

macro_rules! args {
    ($($(#[$doc:meta])* $name:ident : $size:literal { $($at:literal => $field:ident : $type:ty,)+ })+) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy, PartialEq)]
            #[allow(missing_docs)] // Each field is documented on the C side.
            pub struct $name {
                $(pub $field: $type,)+
            }

            const _: () = {
                assert!(size_of::<$name>() == $size);
                $(assert!(std::mem::offset_of!($name, $field) == $at);)+
            };

            impl Args for $name {
                const NAME: &'static str = stringify!($name);
                const FIELDS: &'static [(&'static str, usize)] = &[$((stringify!($field), $at),)+];
            }
        )+

        #[cfg(test)]
        const ALL: &[(&str, usize, &[(&str, usize)])] = &[$(($name::NAME, $size, $name::FIELDS),)+];
    };
}

args! {
    /// See `WriteTokensArgs` in `args.h`.
    WriteTokensArgs: 24 {
        0 => prompt: DevicePtr,
        8 => table: DevicePtr,
        16 => sequences: i32,
        20 => tokens: i32,
    }
    /// See `EmbedArgs` in `args.h`.
    EmbedArgs: 48 {
        0 => index: DevicePtr,
        8 => table: DevicePtr,
        16 => weight: DevicePtr,
        24 => out: DevicePtr,
        32 => out_pitch: i64,
        40 => tokens: i32,
        44 => width: i32,
    }
    /// See `GatherRowsArgs` in `args.h`.
    GatherRowsArgs: 48 {
        0 => x: DevicePtr,
        8 => rows: DevicePtr,
        16 => out: DevicePtr,
        24 => x_pitch: i64,
        32 => out_pitch: i64,
        40 => count: i32,
        44 => width: i32,
    }
    /// See `RmsNormArgs` in `args.h`.
    RmsNormArgs: 72 {
        0 => x: DevicePtr,
        8 => add: DevicePtr,
        16 => weight: DevicePtr,
        24 => out: DevicePtr,
        32 => x_pitch: i64,
        40 => add_pitch: i64,
        48 => out_pitch: i64,
        56 => vectors: i32,
        60 => inner: i32,
        64 => width: i32,
        68 => eps: f32,
    }
    /// See `RopeArgs` in `args.h`.
    RopeArgs: 128 {
        0 => q: DevicePtr,
        8 => k: DevicePtr,
        16 => position: DevicePtr,
        24 => table: DevicePtr,
        32 => q_scale: DevicePtr,
        40 => v: DevicePtr,
        48 => kv_index: DevicePtr,
        56 => k_cache: DevicePtr,
        64 => v_cache: DevicePtr,
        72 => q_pitch: i64,
        80 => k_pitch: i64,
        88 => v_pitch: i64,
        96 => tokens: i32,
        100 => heads: i32,
        104 => kv_heads: i32,
        108 => dim: i32,
        112 => rotary: i32,
        116 => interleaved: i32,
        120 => v_width: i32,
        124 => row_threads: i32,
    }
    /// See `SwigluArgs` in `args.h`.
    SwigluArgs: 48 {
        0 => x: DevicePtr,
        8 => out: DevicePtr,
        16 => x_pitch: i64,
        24 => out_pitch: i64,
        32 => inner: i32,
        36 => activation: i32,
        40 => limit: f32,
        44 => alpha: f32,
    }
    /// See `KvWriteArgs` in `args.h`.
    KvWriteArgs: 64 {
        0 => k: DevicePtr,
        8 => v: DevicePtr,
        16 => kv_index: DevicePtr,
        24 => k_cache: DevicePtr,
        32 => v_cache: DevicePtr,
        40 => k_pitch: i64,
        48 => v_pitch: i64,
        56 => k_width: i32,
        60 => v_width: i32,
    }
    /// See `CopyBlocksArgs` in `args.h`.
    CopyBlocksArgs: 40 {
        0 => copies: DevicePtr,
        8 => k_cache: DevicePtr,
        16 => v_cache: DevicePtr,
        24 => k_bytes: i64,
        32 => v_bytes: i64,
    }
    /// See `AttentionArgs` in `args.h`.
    AttentionArgs: 120 {
        0 => q: DevicePtr,
        8 => k_cache: DevicePtr,
        16 => v_cache: DevicePtr,
        24 => q_start: DevicePtr,
        32 => context: DevicePtr,
        40 => block_table: DevicePtr,
        48 => sinks: DevicePtr,
        56 => out: DevicePtr,
        64 => q_pitch: i64,
        72 => out_pitch: i64,
        80 => sequences: i32,
        84 => table_width: i32,
        88 => block_size: i32,
        92 => heads: i32,
        96 => kv_heads: i32,
        100 => k_dim: i32,
        104 => v_dim: i32,
        108 => mask: i32,
        112 => mask_width: i32,
        116 => scale: f32,
    }
    /// See `SliceArgs` in `args.h`.
    SliceArgs: 16 {
        0 => table: i32,
        4 => offset: i32,
        8 => stride: i32,
        12 => len: i32,
    }
    /// See `LoraArgs` in `args.h`.
    LoraArgs: 96 {
        0 => arena: DevicePtr,
        8 => rows: DevicePtr,
        16 => shrunk: DevicePtr,
        24 => table_rows: i32,
        28 => slice_count: i32,
        32 => slices: [SliceArgs; MAX_SLICES],
    }
    /// See `LoraShrinkArgs` in `args.h`.
    LoraShrinkArgs: 168 {
        0 => x: DevicePtr,
        8 => tiles: DevicePtr,
        16 => perm: DevicePtr,
        24 => pair_weights: DevicePtr,
        32 => lora: LoraArgs,
        128 => x_pitch: i64,
        136 => k: i32,
        140 => tile_words: i32,
        144 => pairs_per_row: i32,
        148 => parts: i32,
        152 => partials: DevicePtr,
        160 => part_pitch: i64,
    }
    /// See `LinearArgs` in `args.h`.
    LinearArgs: 72 {
        0 => x: DevicePtr,
        8 => weight: DevicePtr,
        16 => bias: DevicePtr,
        24 => out: DevicePtr,
        32 => x_pitch: i64,
        40 => out_pitch: i64,
        48 => tokens: i32,
        52 => n: i32,
        56 => k: i32,
        60 => weight_type: i32,
        64 => out_f32: i32,
        68 => aligned: i32,
    }
    /// See `DenseArgs` in `args.h`.
    DenseArgs: 216 {
        0 => base: LinearArgs,
        72 => lora: LoraArgs,
        168 => slot: DevicePtr,
        176 => perm: DevicePtr,
        184 => sums: DevicePtr,
        192 => ready: DevicePtr,
        200 => parts: i32,
        204 => group: i32,
        208 => factor_bytes: i32,
    }
    /// See `DenseClusterArgs` in `args.h`.
    DenseClusterArgs: 512 {
        0 => weight: TensorMap,
        128 => x: TensorMap,
        256 => of: DenseArgs,
        472 => x_rows: i32,
        476 => stages: i32,
        480 => streams: i32,
    }
    /// See `DenseShrinkArgs` in `args.h`.
    DenseShrinkArgs: 152 {
        0 => x: DevicePtr,
        8 => tiles: DevicePtr,
        16 => perm: DevicePtr,
        24 => lora: LoraArgs,
        120 => x_pitch: i64,
        128 => k: i32,
        132 => aligned: i32,
        136 => rank_rows: i32,
        140 => early: i32,
        144 => tile_count: i32,
        148 => block_tiles: i32,
    }
    /// See `LoraLinearArgs` in `args.h`.
    LoraLinearArgs: 192 {
        0 => base: LinearArgs,
        72 => lora: LoraArgs,
        168 => perm: DevicePtr,
        176 => tiles: DevicePtr,
        184 => tile_count: i32,
        188 => reserved: i32,
    }
    /// See `MoeGateUpArgs` in `args.h`.
    MoeGateUpArgs: 200 {
        0 => x: DevicePtr,
        8 => weight: DevicePtr,
        16 => bias: DevicePtr,
        24 => act: DevicePtr,
        32 => perm: DevicePtr,
        40 => tiles: DevicePtr,
        48 => pair_weights: DevicePtr,
        56 => lora_tiles: DevicePtr,
        64 => lora: LoraArgs,
        160 => x_pitch: i64,
        168 => lora_tile_count: i32,
        172 => hidden: i32,
        176 => inner: i32,
        180 => top_k: i32,
        184 => weight_type: i32,
        188 => activation: i32,
        192 => limit: f32,
        196 => alpha: f32,
    }
    /// See `MoeDownArgs` in `args.h`.
    MoeDownArgs: 168 {
        0 => act: DevicePtr,
        8 => weight: DevicePtr,
        16 => bias: DevicePtr,
        24 => y: DevicePtr,
        32 => perm: DevicePtr,
        40 => tiles: DevicePtr,
        48 => lora_tiles: DevicePtr,
        56 => lora: LoraArgs,
        152 => lora_tile_count: i32,
        156 => hidden: i32,
        160 => inner: i32,
        164 => weight_type: i32,
    }
    /// See `MoeStreamArgs` in `args.h`.
    MoeStreamArgs: 208 {
        0 => x: DevicePtr,
        8 => weight: DevicePtr,
        16 => bias: DevicePtr,
        24 => out: DevicePtr,
        32 => perm: DevicePtr,
        40 => tiles: DevicePtr,
        48 => lora_tiles: DevicePtr,
        56 => clear: DevicePtr,
        64 => state: DevicePtr,
        72 => lora: LoraArgs,
        168 => x_pitch: i64,
        176 => tile_count: i32,
        180 => lora_tile_count: i32,
        184 => n: i32,
        188 => top_k: i32,
        192 => pairs: i32,
        196 => activation: i32,
        200 => limit: f32,
        204 => alpha: f32,
    }
    /// See `MoeCombineArgs` in `args.h`.
    MoeCombineArgs: 56 {
        0 => y: DevicePtr,
        8 => experts: DevicePtr,
        16 => weights: DevicePtr,
        24 => out: DevicePtr,
        32 => out_pitch: i64,
        40 => hidden: i32,
        44 => top_k: i32,
        48 => add: i32,
        52 => reserved: i32,
    }
    /// See `MoePrefillArgs` in `args.h`.
    MoePrefillArgs: 1344 {
        0 => map: TensorMap,
        128 => tokens: TensorMap,
        256 => shrunk_map: TensorMap,
        384 => factors: [TensorMap; 6],
        1152 => weight: DevicePtr,
        1160 => x: DevicePtr,
        1168 => bias: DevicePtr,
        1176 => out: DevicePtr,
        1184 => perm: DevicePtr,
        1192 => tiles: DevicePtr,
        1200 => lora_tiles: DevicePtr,
        1208 => arena: DevicePtr,
        1216 => rows: DevicePtr,
        1224 => shrunk: DevicePtr,
        1232 => x_pitch: i64,
        1240 => tile_count: i32,
        1244 => lora_tile_count: i32,
        1248 => table_rows: i32,
        1252 => tables: [i32; 2],
        1260 => hidden: i32,
        1264 => inner: i32,
        1268 => experts: i32,
        1272 => top_k: i32,
        1276 => activation: i32,
        1280 => limit: f32,
        1284 => alpha: f32,
        1288 => ready: DevicePtr,
    }
    /// See `MoePrefillBothArgs` in `args.h`.
    MoePrefillBothArgs: 2688 {
        0 => gate_up: MoePrefillArgs,
        1344 => down: MoePrefillArgs,
    }
    /// See `MoePrefillGatherArgs` in `args.h`.
    MoePrefillGatherArgs: 48 {
        0 => x: DevicePtr,
        8 => perm: DevicePtr,
        16 => out: DevicePtr,
        24 => x_pitch: i64,
        32 => pairs: i32,
        36 => hidden: i32,
        40 => top_k: i32,
        44 => reserved: i32,
    }
    /// See `MoePrefillShrinkArgs` in `args.h`.
    MoePrefillShrinkArgs: 88 {
        0 => x: DevicePtr,
        8 => perm: DevicePtr,
        16 => lora_tiles: DevicePtr,
        24 => arena: DevicePtr,
        32 => rows: DevicePtr,
        40 => shrunk: DevicePtr,
        48 => x_pitch: i64,
        56 => lora_tile_count: i32,
        60 => table_rows: i32,
        64 => tables: [i32; 2],
        72 => k: i32,
        76 => top_k: i32,
        80 => needs: i32,
        84 => reserved: i32,
    }
    /// See `MoePrefillGatherShrinkArgs` in `args.h`.
    MoePrefillGatherShrinkArgs: 136 {
        0 => gather: MoePrefillGatherArgs,
        48 => shrink: MoePrefillShrinkArgs,
    }
    /// See `RouteTopkArgs` in `args.h`.
    RouteTopkArgs: 96 {
        0 => logits: DevicePtr,
        8 => live: DevicePtr,
        16 => slot: DevicePtr,
        24 => correction: DevicePtr,
        32 => chosen: DevicePtr,
        40 => weights: DevicePtr,
        48 => keys: DevicePtr,
        56 => experts: i32,
        60 => top_k: i32,
        64 => slots: i32,
        68 => score: i32,
        72 => groups: i32,
        76 => keep: i32,
        80 => best: i32,
        84 => renorm: i32,
        88 => scale: f32,
        92 => reserved: i32,
    }
    /// See `RouteSortArgs` in `args.h`.
    RouteSortArgs: 144 {
        0 => choose: RouteTopkArgs,
        96 => perm: DevicePtr,
        104 => tiles: DevicePtr,
        112 => lora_tiles: DevicePtr,
        120 => tokens: i32,
        124 => tile_rows: i32,
        128 => tile_count: i32,
        132 => lora_tile_count: i32,
        136 => chosen: i32,
        140 => reserved: i32,
    }
    /// See `RouteRankArgs` in `args.h`.
    RouteRankArgs: 32 {
        0 => keys: DevicePtr,
        8 => sorted: DevicePtr,
        16 => perm: DevicePtr,
        24 => pairs: i32,
        28 => reserved: i32,
    }
    /// See `RouteTilesArgs` in `args.h`.
    RouteTilesArgs: 48 {
        0 => sorted: DevicePtr,
        8 => tiles: DevicePtr,
        16 => lora_tiles: DevicePtr,
        24 => pairs: i32,
        28 => slots: i32,
        32 => tile_rows: i32,
        36 => tile_count: i32,
        40 => lora_tile_count: i32,
        44 => reserved: i32,
    }
    /// See `SamplePartial` in `args.h`.
    SamplePartial: 40 {
        0 => first: u64,
        8 => bound: u64,
        16 => mass: f64,
        24 => raw_mass: f64,
        32 => raw_peak: f32,
        36 => reserved: i32,
    }
    /// See `SampleArgs` in `args.h`.
    SampleArgs: 96 {
        0 => logits: DevicePtr,
        8 => sampling: DevicePtr,
        16 => sample_slot: DevicePtr,
        24 => edit_start: DevicePtr,
        32 => edits: DevicePtr,
        40 => table: DevicePtr,
        48 => result: DevicePtr,
        56 => partials: DevicePtr,
        64 => keys: DevicePtr,
        72 => edited: DevicePtr,
        80 => vocab: i32,
        84 => chunks: i32,
        88 => candidates: i32,
        92 => reserved: i32,
    }
    /// See `LogprobPartial` in `args.h`.
    LogprobPartial: 24 {
        0 => first: u64,
        8 => mass: f64,
        16 => before: i32,
        20 => reserved: i32,
    }
    /// See `LogprobsArgs` in `args.h`.
    LogprobsArgs: 72 {
        0 => logits: DevicePtr,
        8 => target: DevicePtr,
        16 => best: DevicePtr,
        24 => sample_slot: DevicePtr,
        32 => table: DevicePtr,
        40 => out: DevicePtr,
        48 => partials: DevicePtr,
        56 => keys: DevicePtr,
        64 => vocab: i32,
        68 => chunks: i32,
    }
}

impl LoraArgs {
    /// No adapters.
    pub const NONE: LoraArgs = LoraArgs {
        arena: DevicePtr::NULL,
        rows: DevicePtr::NULL,
        shrunk: DevicePtr::NULL,
        table_rows: 0,
        slice_count: 0,
        slices: [SliceArgs { table: 0, offset: 0, stride: 1, len: 0 }; MAX_SLICES],
    };
}

/// `ElementType` of `args.h`.
pub mod element {
    #![allow(missing_docs)]
    pub const F32: i32 = 0;
    pub const F16: i32 = 1;
    pub const BF16: i32 = 2;
}

/// `kAligned…` of `dense.cuh`: bits of `LinearArgs::aligned`.
pub mod aligned {
    #![allow(missing_docs)]
    pub const OPERANDS: i32 = 1;
    pub const PAIRS: i32 = 2;
    pub const ROWS: i32 = 4;
}

/// `MaskKind` of `args.h`.
pub mod mask {
    #![allow(missing_docs)]
    pub const CAUSAL: i32 = 0;
    pub const WINDOW: i32 = 1;
    pub const CHUNK: i32 = 2;
}

/// `ScoreKind` of `args.h`.
pub mod score {
    #![allow(missing_docs)]
    pub const SOFTMAX_TOPK: i32 = 0;
    pub const SOFTMAX: i32 = 1;
    pub const SIGMOID: i32 = 2;
}

/// `ActivationKind` of `args.h`.
pub mod activation {
    #![allow(missing_docs)]
    pub const SWIGLU: i32 = 0;
    pub const CLAMPED_INTERLEAVED: i32 = 1;
}

/// `ShrinkNeeds` of `args.h`.
pub mod needs {
    #![allow(missing_docs)]
    pub const ALL: i32 = 0;
    pub const NOTHING: i32 = 1;
    pub const X: i32 = 2;
}

#[cfg(test)]
mod tests;
