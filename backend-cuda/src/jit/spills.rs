//! What the assembler says of kernels that are slower than they were meant. Registers that a kernel lacks: what
//! does not fit is kept in memory. Every such kernel is in a list here with its reason, and compiling all kernels
//! fails on any other. And warpgroup products that wait for each other, on which it fails always.

/// Kernels, by the beginning of their names, that keep nothing else in memory of their own either: a structure that the
/// assembler puts on the stack, say. Its stores hold up a stream of weights more than what is done with it.
const WITHOUT_STACK: &str = "stream_";

/// A kernel and the bytes that it spills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spill {
    /// The kernel.
    pub kernel: String,
    /// Bytes stored, of a thread; of a kernel without a stack those of a stack, if more.
    pub bytes: usize,
}

/// Kernels that may spill, up to so many bytes on any architecture, and why that is accepted.
const ACCEPTED: &[(&str, usize, &str)] = &[
    ("attention_flash_256", 400, "heads of 256 elements fill the registers with sums"),
    ("attention_split_256", 64, "heads of 256 elements fill the registers with sums"),
    ("moe_gate_up", 128, "the path for every type and shape, which no speed depends on"),
    ("moe_prefill_lora", 64, "sums and operands of deltas fill the registers"),
    ("moe_gate_up_lora", 128, "the path for every type and shape, which no speed depends on"),
    ("stream_gate_up_lora_8", 64, "three warps of a scheduler share its registers"),
    ("stream_gate_up_8", 16, "three warps of a scheduler share its registers"),
    ("lora_shrink", 16, "the path for every type and shape, which no speed depends on"),
    ("route_few", 32, "on sm_80 alone, where its 512 threads leave it half the registers"),
    ("linear_stream_16", 32, "on sm_80 alone; four warps of a scheduler share its registers"),
    ("stream_down_lora_8", 32, "three warps of a scheduler share its registers"),
    ("linear_group_large", 64, "its sums fill the registers; smaller tiles read more"),
    ("rope_many", 32, "in f16 alone, where a third block of a processor is worth more"),
    ("dense_shrink_many", 64, "on sm_80 alone; sums and a ring of operands fill the registers"),
    ("logprobs_survey", 32, "on sm_100a alone"),
    ("sample_survey", 64, "on sm_100a alone"),
];

impl Spill {
    /// Whether the list has it.
    pub fn is_accepted(&self) -> bool {
        ACCEPTED.iter().any(|(kernel, most, _)| self.kernel == *kernel && self.bytes <= *most)
    }
}

impl std::fmt::Display for Spill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Spill { kernel, bytes } = self;
        write!(f, "{kernel} spills {bytes} bytes")?;
        match ACCEPTED.iter().find(|(name, ..)| name == kernel) {
            Some((_, most, reason)) => write!(f, " (up to {most} accepted: {reason})"),
            None => Ok(()),
        }
    }
}

/// The kernels that spill, from what the assembler says when it is asked to be verbose.
pub(super) fn spills(log: &str) -> Vec<Spill> {
    let mut kernel = "";
    let mut found = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or(rest);
        }
        let number_in_front_of = |words: &str| -> Option<usize> {
            line.split_once(words)?.0.rsplit([' ', ',']).next()?.parse().ok()
        };
        let Some(stored) = number_in_front_of(" bytes spill stores") else { continue };
        let stack =
            number_in_front_of(" bytes stack frame").filter(|_| kernel.starts_with(WITHOUT_STACK));
        let bytes = stored.max(stack.unwrap_or(0));
        if bytes > 0 {
            found.push(Spill { kernel: kernel.to_owned(), bytes });
        }
    }
    found
}

/// Its words on kernels whose warpgroup products it makes one after the other, because it loses sight of
/// them: of one whose body it has not put into the entry, say, since they then cross a call.
pub(super) fn serialized(log: &str) -> Vec<String> {
    let words = "wgmma.mma_async instructions are serialized";
    log.lines().filter(|line| line.contains(words)).map(|line| line.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_that_wait_for_each_other_are_found() {
        let log = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized \
                   due to wgmma pipeline crossing function boundary at a function call in the function 'slow'\n\
                   ptxas info    : Compiling entry function 'slow' for 'sm_90a'\n";
        let found = serialized(log);
        assert!(found.len() == 1 && found[0].ends_with("'slow'"), "{found:?}");
    }

    #[test]
    fn spills_are_read_from_the_assembler_s_words() {
        let log = "ptxas info    : Compiling entry function 'even' for 'sm_90a'\n\
                   ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Compiling entry function 'wide' for 'sm_90a'\n\
                   ptxas         .     96 bytes stack frame, 292 bytes spill stores, 160 bytes spill loads\n";
        let found = spills(log);
        assert_eq!(found, [Spill { kernel: "wide".to_owned(), bytes: 292 }]);
        assert!(!found[0].is_accepted(), "nobody has accepted it");
    }

    #[test]
    fn a_stack_is_found_where_none_may_be() {
        let of = |kernel: &str| {
            format!(
                "ptxas info    : Compiling entry function '{kernel}' for 'sm_90a'\n\
                 ptxas         .     32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
            )
        };
        let found = spills(&of("stream_gate_up_lora_16"));
        assert_eq!(found, [Spill { kernel: "stream_gate_up_lora_16".to_owned(), bytes: 32 }]);
        assert!(!found[0].is_accepted(), "it made adapters cost twice as much");
        assert_eq!(spills(&of("attention_split_256")), []);
    }

    #[test]
    fn a_kernel_of_the_list_may_spill_so_much_and_no_more() {
        let (kernel, most, _) = ACCEPTED[0];
        let spill = |bytes| Spill { kernel: kernel.to_owned(), bytes };
        assert!(spill(most).is_accepted() && !spill(most + 1).is_accepted());
    }
}
