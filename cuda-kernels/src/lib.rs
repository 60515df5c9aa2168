//! CUDA device source, and what the host must know of it: the argument structs, and which kernel lies
//! in which file.
//!
//! A [`Source`] is a `.cuh` of templates. A *unit*, written by whoever compiles, includes one, names
//! its constants in a `Config`, and wraps each kernel of the file in an `extern "C"` entry of the same
//! name (see [`Source::kernels`]). An entry takes one `__grid_constant__` struct, an [`Args`] of this
//! crate; a typed [`Entry`] ties the two, so a launch with another struct does not compile.
//!
//! Nothing here chooses a tile, knows a model, or calls a driver.
#![forbid(unsafe_code)]

pub mod args;
mod includes;

use std::marker::PhantomData;

pub use args::{Args, DevicePtr};
pub use includes::included;

/// A file of device source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct File {
    /// The name by which others include it.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

macro_rules! files {
    ($($name:literal => $path:literal,)+) => {
        /// Every file that a unit may include.
        pub const FILES: &[File] = &[$(File { name: $name, text: include_str!($path) },)+];
    };
}

files! {
    "amphora/activation.cuh" => "../include/amphora/activation.cuh",
    "amphora/adapters_present.cuh" => "../include/amphora/adapters_present.cuh",
    "amphora/args.h" => "../include/amphora/args.h",
    "amphora/args_layout.h" => "../include/amphora/args_layout.h",
    "amphora/attention.cuh" => "../include/amphora/attention.cuh",
    "amphora/async.cuh" => "../include/amphora/async.cuh",
    "amphora/bulk.cuh" => "../include/amphora/bulk.cuh",
    "amphora/cluster.cuh" => "../include/amphora/cluster.cuh",
    "amphora/copies.cuh" => "../include/amphora/copies.cuh",
    "amphora/dense.cuh" => "../include/amphora/dense.cuh",
    "amphora/dense_shrunk.cuh" => "../include/amphora/dense_shrunk.cuh",
    "amphora/dtype.cuh" => "../include/amphora/dtype.cuh",
    "amphora/group_attention.cuh" => "../include/amphora/group_attention.cuh",
    "amphora/group_product.cuh" => "../include/amphora/group_product.cuh",
    "amphora/logits.cuh" => "../include/amphora/logits.cuh",
    "amphora/matrices.cuh" => "../include/amphora/matrices.cuh",
    "amphora/mma.cuh" => "../include/amphora/mma.cuh",
    "amphora/moe_deltas.cuh" => "../include/amphora/moe_deltas.cuh",
    "amphora/moe_rest.cuh" => "../include/amphora/moe_rest.cuh",
    "amphora/moe_stream.cuh" => "../include/amphora/moe_stream.cuh",
    "amphora/moe_work.cuh" => "../include/amphora/moe_work.cuh",
    "amphora/octet.cuh" => "../include/amphora/octet.cuh",
    "amphora/overlap.cuh" => "../include/amphora/overlap.cuh",
    "amphora/product.cuh" => "../include/amphora/product.cuh",
    "amphora/reduce.cuh" => "../include/amphora/reduce.cuh",
    "amphora/rotary.cuh" => "../include/amphora/rotary.cuh",
    "amphora/tile.cuh" => "../include/amphora/tile.cuh",
    "amphora/wgmma.cuh" => "../include/amphora/wgmma.cuh",
    "kernels/attention_flash.cuh" => "../kernels/attention_flash.cuh",
    "kernels/attention_group.cuh" => "../kernels/attention_group.cuh",
    "kernels/attention_group_block.cuh" => "../kernels/attention_group_block.cuh",
    "kernels/attention_group_bring.cuh" => "../kernels/attention_group_bring.cuh",
    "kernels/attention_group_multiply.cuh" => "../kernels/attention_group_multiply.cuh",
    "kernels/attention_split.cuh" => "../kernels/attention_split.cuh",
    "kernels/copy_blocks.cuh" => "../kernels/copy_blocks.cuh",
    "kernels/dense_shrink.cuh" => "../kernels/dense_shrink.cuh",
    "kernels/dense_shrink_group.cuh" => "../kernels/dense_shrink_group.cuh",
    "kernels/dense_shrink_many.cuh" => "../kernels/dense_shrink_many.cuh",
    "kernels/fused_moe.cuh" => "../kernels/fused_moe.cuh",
    "kernels/fused_moe_prefill.cuh" => "../kernels/fused_moe_prefill.cuh",
    "kernels/fused_moe_prefill_mma.cuh" => "../kernels/fused_moe_prefill_mma.cuh",
    "kernels/kv_write.cuh" => "../kernels/kv_write.cuh",
    "kernels/linear.cuh" => "../kernels/linear.cuh",
    "kernels/linear_cluster.cuh" => "../kernels/linear_cluster.cuh",
    "kernels/linear_group.cuh" => "../kernels/linear_group.cuh",
    "kernels/linear_stream.cuh" => "../kernels/linear_stream.cuh",
    "kernels/linear_tile.cuh" => "../kernels/linear_tile.cuh",
    "kernels/logprobs.cuh" => "../kernels/logprobs.cuh",
    "kernels/lora_expand.cuh" => "../kernels/lora_expand.cuh",
    "kernels/lora_shrink.cuh" => "../kernels/lora_shrink.cuh",
    "kernels/moe_prefill_between.cuh" => "../kernels/moe_prefill_between.cuh",
    "kernels/moe_prefill_block.cuh" => "../kernels/moe_prefill_block.cuh",
    "kernels/moe_prefill_bring.cuh" => "../kernels/moe_prefill_bring.cuh",
    "kernels/moe_prefill_epilogue.cuh" => "../kernels/moe_prefill_epilogue.cuh",
    "kernels/moe_prefill_gather.cuh" => "../kernels/moe_prefill_gather.cuh",
    "kernels/moe_prefill_multiply.cuh" => "../kernels/moe_prefill_multiply.cuh",
    "kernels/moe_prefill_plan.cuh" => "../kernels/moe_prefill_plan.cuh",
    "kernels/moe_prefill_ready.cuh" => "../kernels/moe_prefill_ready.cuh",
    "kernels/moe_prefill_shrink.cuh" => "../kernels/moe_prefill_shrink.cuh",
    "kernels/moe_prefill_shrunk.cuh" => "../kernels/moe_prefill_shrunk.cuh",
    "kernels/moe_route.cuh" => "../kernels/moe_route.cuh",
    "kernels/paged_attention.cuh" => "../kernels/paged_attention.cuh",
    "kernels/rms_norm.cuh" => "../kernels/rms_norm.cuh",
    "kernels/rope.cuh" => "../kernels/rope.cuh",
    "kernels/rope_many.cuh" => "../kernels/rope_many.cuh",
    "kernels/route_sort.cuh" => "../kernels/route_sort.cuh",
    "kernels/rows.cuh" => "../kernels/rows.cuh",
    "kernels/sample.cuh" => "../kernels/sample.cuh",
    "kernels/sample_all.cuh" => "../kernels/sample_all.cuh",
    "kernels/stream_down.cuh" => "../kernels/stream_down.cuh",
    "kernels/stream_gate_up.cuh" => "../kernels/stream_gate_up.cuh",
    "kernels/swiglu.cuh" => "../kernels/swiglu.cuh",
}

/// A kernel as the unit's writer sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// The name of template and entry.
    pub name: &'static str,
    /// The struct it takes.
    pub args: &'static str,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks that a processor must have room for. Named where warps exchange registers, since the assembler
    /// must know how many each has at first, and where it would rather spill than keep fewer blocks.
    pub blocks: Option<u32>,
    /// The file it lies in.
    pub source: Source,
}

/// A kernel with the type of its arguments.
#[derive(Debug)]
pub struct Entry<A> {
    id: KernelId,
    args: PhantomData<fn(A)>,
}

impl<A> Clone for Entry<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Entry<A> {}

impl<A: Args> Entry<A> {
    /// Which kernel.
    pub fn id(self) -> KernelId {
        self.id
    }
}

macro_rules! sources {
    ($($source:ident $file:literal $elements:ident {
        $($entry:ident $id:ident $name:literal ($args:ident) $threads:literal $(x $blocks:literal)?;)+
    })+) => {
        /// A file of kernels that is compiled as one unit.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs)] // Each is the file of that name.
        pub enum Source {
            $($source,)+
        }

        impl Source {
            /// All of them.
            pub const ALL: &'static [Source] = &[$(Source::$source,)+];

            /// Its name in [`FILES`].
            pub fn file(self) -> &'static str {
                match self {
                    $(Source::$source => concat!("kernels/", $file, ".cuh"),)+
                }
            }

            /// Its name without folder and ending.
            pub fn name(self) -> &'static str {
                match self {
                    $(Source::$source => $file,)+
                }
            }

            /// Whether it is compiled for each element type or once.
            pub fn elements(self) -> Elements {
                match self {
                    $(Source::$source => Elements::$elements,)+
                }
            }

            /// Its kernels.
            pub fn kernels(self) -> impl Iterator<Item = KernelId> {
                KernelId::ALL.iter().copied().filter(move |id| id.kernel().source == self)
            }
        }

        /// Names a kernel.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs)] // Each is the kernel of that name.
        pub enum KernelId {
            $($($id,)+)+
        }

        impl KernelId {
            /// All of them.
            pub const ALL: &'static [KernelId] = &[$($(KernelId::$id,)+)+];

            /// What a unit's writer needs.
            pub fn kernel(self) -> Kernel {
                match self {
                    $($(KernelId::$id => Kernel {
                        name: $name,
                        args: <args::$args as Args>::NAME,
                        threads: $threads,
                        blocks: None$(.or(Some($blocks)))?,
                        source: Source::$source,
                    },)+)+
                }
            }
        }

        $($(
            #[doc = concat!("The kernel `", $name, "`.")]
            pub const $entry: Entry<args::$args> = Entry {
                id: KernelId::$id,
                args: PhantomData,
            };
        )+)+
    };
}

/// How often a source is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Elements {
    /// Once for each compute type, as `Config::Element`.
    Each,
    /// Once for f16 and once for bf16: the types that tensor cores take.
    Half,
    /// Once: its operands have fixed types.
    Once,
    /// For each compute type of two bytes and width of a product's input, when one is first used.
    /// Compute capability 9.0 and later.
    Stream,
}

sources! {
    Rows "rows" Each {
        WRITE_TOKENS WriteTokens "write_tokens" (WriteTokensArgs) 256;
        EMBED Embed "embed" (EmbedArgs) 256;
        GATHER_ROWS GatherRows "gather_rows" (GatherRowsArgs) 256;
    }
    RmsNorm "rms_norm" Each {
        RMS_NORM RmsNorm "rms_norm" (RmsNormArgs) 256;
        RMS_NORM_SHORT RmsNormShort "rms_norm_short" (RmsNormArgs) 256;
    }
    Rope "rope" Each {
        ROPE Rope "rope" (RopeArgs) 256;
    }
    RopeMany "rope_many" Each {
        ROPE_MANY RopeMany "rope_many" (RopeArgs) 256 x 3;
    }
    Swiglu "swiglu" Each {
        SWIGLU Swiglu "swiglu" (SwigluArgs) 256;
    }
    KvWrite "kv_write" Each {
        KV_WRITE KvWrite "kv_write" (KvWriteArgs) 128;
    }
    PagedAttention "paged_attention" Each {
        PAGED_ATTENTION PagedAttention "paged_attention" (AttentionArgs) 128;
    }
    AttentionSplit "attention_split" Half {
        ATTENTION_SPLIT_64 AttentionSplit64 "attention_split_64" (AttentionArgs) 128;
        ATTENTION_SPLIT_128 AttentionSplit128 "attention_split_128" (AttentionArgs) 128;
        ATTENTION_SPLIT_256 AttentionSplit256 "attention_split_256" (AttentionArgs) 128;
    }
    AttentionFlash "attention_flash" Half {
        ATTENTION_FLASH_64 AttentionFlash64 "attention_flash_64" (AttentionArgs) 256;
        ATTENTION_FLASH_128 AttentionFlash128 "attention_flash_128" (AttentionArgs) 256;
        ATTENTION_FLASH_256 AttentionFlash256 "attention_flash_256" (AttentionArgs) 256;
    }
    AttentionGroup "attention_group" Half {
        ATTENTION_GROUP_64 AttentionGroup64 "attention_group_64" (AttentionArgs) 384 x 2;
        ATTENTION_GROUP_128 AttentionGroup128 "attention_group_128" (AttentionArgs) 512 x 1;
    }
    Linear "linear" Each {
        LINEAR Linear "linear" (LinearArgs) 256;
        LORA_LINEAR LoraLinear "lora_linear" (LoraLinearArgs) 256;
    }
    LinearStream "linear_stream" Half {
        LINEAR_STREAM_8 LinearStream8 "linear_stream_8" (DenseArgs) 512;
        LINEAR_STREAM_16 LinearStream16 "linear_stream_16" (DenseArgs) 512;
    }
    LinearCluster "linear_cluster" Half {
        LINEAR_CLUSTER LinearCluster "linear_cluster" (DenseClusterArgs) 256;
    }
    LinearGroup "linear_group" Half {
        LINEAR_GROUP_FLAT LinearGroupFlat "linear_group_flat" (DenseClusterArgs) 384 x 1;
        LINEAR_GROUP_SLIM LinearGroupSlim "linear_group_slim" (DenseClusterArgs) 384 x 1;
        LINEAR_GROUP_SQUARE LinearGroupSquare "linear_group_square" (DenseClusterArgs) 384 x 1;
        LINEAR_GROUP_LARGE LinearGroupLarge "linear_group_large" (DenseClusterArgs) 384 x 1;
    }
    LinearTile "linear_tile" Half {
        LINEAR_NARROW LinearNarrow "linear_narrow" (DenseArgs) 128;
        LINEAR_WIDE LinearWide "linear_wide" (DenseArgs) 256;
        LINEAR_CLEAR LinearClear "linear_clear" (DenseArgs) 128;
        LINEAR_FINISH LinearFinish "linear_finish" (DenseArgs) 128;
    }
    DenseShrink "dense_shrink" Half {
        DENSE_SHRINK DenseShrink "dense_shrink" (DenseShrinkArgs) 256;
    }
    DenseShrinkGroup "dense_shrink_group" Half {
        DENSE_SHRINK_GROUP DenseShrinkGroup "dense_shrink_group" (DenseClusterArgs) 384 x 1;
    }
    DenseShrinkMany "dense_shrink_many" Half {
        DENSE_SHRINK_MANY DenseShrinkMany "dense_shrink_many" (DenseShrinkArgs) 256 x 1;
    }
    LoraShrink "lora_shrink" Each {
        LORA_SHRINK LoraShrink "lora_shrink" (LoraShrinkArgs) 256;
        LORA_SHRINK_CLEAR LoraShrinkClear "lora_shrink_clear" (LoraShrinkArgs) 256;
        LORA_SHRINK_SUM LoraShrinkSum "lora_shrink_sum" (LoraShrinkArgs) 256;
    }
    FusedMoe "fused_moe" Each {
        MOE_GATE_UP MoeGateUp "moe_gate_up" (MoeGateUpArgs) 256;
        MOE_GATE_UP_LORA MoeGateUpLora "moe_gate_up_lora" (MoeGateUpArgs) 256;
        MOE_DOWN MoeDown "moe_down" (MoeDownArgs) 256;
        MOE_DOWN_DELTA MoeDownDelta "moe_down_delta" (MoeDownArgs) 256;
        MOE_DOWN_LORA MoeDownLora "moe_down_lora" (MoeDownArgs) 256;
        MOE_COMBINE MoeCombine "moe_combine" (MoeCombineArgs) 256;
    }
    StreamGateUp "stream_gate_up" Stream {
        STREAM_GATE_UP_8 StreamGateUp8 "stream_gate_up_8" (MoeStreamArgs) 384;
        STREAM_GATE_UP_16 StreamGateUp16 "stream_gate_up_16" (MoeStreamArgs) 384;
        STREAM_GATE_UP_LORA_8 StreamGateUpLora8 "stream_gate_up_lora_8" (MoeStreamArgs) 384;
        STREAM_GATE_UP_LORA_16 StreamGateUpLora16 "stream_gate_up_lora_16" (MoeStreamArgs) 384;
    }
    StreamDown "stream_down" Stream {
        STREAM_DOWN_8 StreamDown8 "stream_down_8" (MoeStreamArgs) 384;
        STREAM_DOWN_16 StreamDown16 "stream_down_16" (MoeStreamArgs) 384;
        STREAM_DOWN_LORA_8 StreamDownLora8 "stream_down_lora_8" (MoeStreamArgs) 384;
        STREAM_DOWN_LORA_16 StreamDownLora16 "stream_down_lora_16" (MoeStreamArgs) 384;
    }
    FusedMoePrefill "fused_moe_prefill" Half {
        MOE_PREFILL MoePrefill "moe_prefill" (MoePrefillBothArgs) 384;
        MOE_PREFILL_LORA MoePrefillLora "moe_prefill_lora" (MoePrefillBothArgs) 384;
        MOE_PREFILL_SOME MoePrefillSome "moe_prefill_some" (MoePrefillBothArgs) 384;
        MOE_PREFILL_SOME_LORA MoePrefillSomeLora "moe_prefill_some_lora" (MoePrefillBothArgs) 384;
        MOE_PREFILL_FEW MoePrefillFew "moe_prefill_few" (MoePrefillBothArgs) 384;
        MOE_PREFILL_GATE_UP MoePrefillGateUp "moe_prefill_gate_up" (MoePrefillArgs) 384;
        MOE_PREFILL_DOWN MoePrefillDown "moe_prefill_down" (MoePrefillArgs) 384;
        MOE_PREFILL_SOME_GATE_UP MoePrefillSomeGateUp "moe_prefill_some_gate_up" (MoePrefillArgs) 384;
        MOE_PREFILL_SOME_DOWN MoePrefillSomeDown "moe_prefill_some_down" (MoePrefillArgs) 384;
        MOE_PREFILL_FEW_GATE_UP MoePrefillFewGateUp "moe_prefill_few_gate_up" (MoePrefillArgs) 384;
        MOE_PREFILL_FEW_DOWN MoePrefillFewDown "moe_prefill_few_down" (MoePrefillArgs) 384;
    }
    MoePrefillGather "moe_prefill_gather" Once {
        MOE_PREFILL_GATHER MoePrefillGather "moe_prefill_gather" (MoePrefillGatherArgs) 256;
    }
    FusedMoePrefillMma "fused_moe_prefill_mma" Half {
        MOE_PREFILL_MMA_GATE_UP MoePrefillMmaGateUp "moe_prefill_mma_gate_up" (MoePrefillArgs) 256;
        MOE_PREFILL_MMA_DOWN MoePrefillMmaDown "moe_prefill_mma_down" (MoePrefillArgs) 256;
    }
    MoePrefillShrink "moe_prefill_shrink" Half {
        MOE_PREFILL_SHRINK MoePrefillShrink "moe_prefill_shrink" (MoePrefillShrinkArgs) 256;
        MOE_PREFILL_GATHER_SHRINK MoePrefillGatherShrink "moe_prefill_gather_shrink" (MoePrefillGatherShrinkArgs) 256;
    }
    MoeRoute "moe_route" Once {
        ROUTE_TOPK RouteTopk "route_topk" (RouteTopkArgs) 32;
        ROUTE_RANK RouteRank "route_rank" (RouteRankArgs) 256;
        ROUTE_TILES RouteTiles "route_tiles" (RouteTilesArgs) 1024;
    }
    CopyBlocks "copy_blocks" Once {
        COPY_BLOCKS CopyBlocks "copy_blocks" (CopyBlocksArgs) 256;
    }
    Logprobs "logprobs" Once {
        LOGPROBS_SURVEY LogprobsSurvey "logprobs_survey" (LogprobsArgs) 256;
        LOGPROBS_FINISH LogprobsFinish "logprobs_finish" (LogprobsArgs) 256;
    }
    RouteSort "route_sort" Once {
        ROUTE_CHOOSE RouteChoose "route_choose" (RouteSortArgs) 256;
        ROUTE_FEW RouteFew "route_few" (RouteSortArgs) 512;
        ROUTE_SORT RouteSort "route_sort" (RouteSortArgs) 512;
    }
    Sample "sample" Once {
        SAMPLE_SURVEY SampleSurvey "sample_survey" (SampleArgs) 256;
        SAMPLE_FINISH SampleFinish "sample_finish" (SampleArgs) 512;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_a_template_of_its_file() {
        for id in KernelId::ALL {
            let kernel = id.kernel();
            let file = FILES.iter().find(|f| f.name == kernel.source.file());
            let text = file.expect("the file is embedded").text;
            let signature = format!("void {}(const {}& args)", kernel.name, kernel.args);
            let is_there = ["__device__", "__device__ __forceinline__"]
                .iter()
                .any(|how| text.contains(&format!("{how} {signature}")));
            assert!(is_there, "{signature}");
        }
    }

    #[test]
    fn every_file_on_disk_is_embedded() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        for (folder, prefix) in [("include/amphora", "amphora"), ("kernels", "kernels")] {
            for entry in std::fs::read_dir(root.join(folder)).expect("the folder is there") {
                let name = entry.expect("it can be read").file_name();
                let name = format!("{prefix}/{}", name.to_string_lossy());
                assert!(FILES.iter().any(|f| f.name == name), "{name} is not embedded");
            }
        }
    }
}
