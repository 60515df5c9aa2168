//! A start that the device's memory does not hold: what it wanted of each pool, and what would fit.

use std::fmt;

use amphora_hal::Pool;

/// Bytes that a start takes from each pool, told when one has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoRoom {
    /// The pool whose reservation failed.
    pub failed: Pool,
    /// Bytes that may be used.
    pub limit: usize,
    /// Bytes that others, the driver among them, took of what could be used when the device was opened.
    pub taken: usize,
    /// Base weights; `None` where the start failed before they were counted.
    pub weights: Option<usize>,
    /// Arena and table of adapters.
    pub adapters: usize,
    /// Keys and values.
    pub kv: usize,
    /// Activations and operators' workspace.
    pub scratch: usize,
    /// Keys and values of one position.
    pub kv_per_position: usize,
}

impl NoRoom {
    /// Bytes of all but the cache.
    fn beside_cache(&self) -> usize {
        self.weights.unwrap_or(0) + self.adapters + self.scratch
    }
}

/// A number of bytes as people read it.
fn gib(bytes: usize) -> String {
    format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64)
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let weights = self.weights.map_or("weights (not counted yet)".to_owned(), |bytes| {
            format!("weights {}", gib(bytes))
        });
        write!(
            f,
            "out of memory in pool {}: {weights} + adapters {} + KV cache {} + scratch {} are {}, of {} \
             that may be used",
            self.failed,
            gib(self.adapters),
            gib(self.kv),
            gib(self.scratch),
            gib(self.beside_cache() + self.kv),
            gib(self.limit),
        )?;
        if self.taken > 0 {
            let taken = gib(self.taken);
            write!(
                f,
                " (other processes and the driver took {taken} since the device was opened)"
            )?;
        }
        f.write_str("; ")?;
        let left = self.limit.saturating_sub(self.beside_cache());
        match left.checked_div(self.kv_per_position) {
            None | Some(0) => f.write_str(
                "what is beside the cache leaves it no room: take fewer or smaller adapters, smaller \
                 steps, or a smaller model",
            ),
            Some(fits) => write!(
                f,
                "beside the rest a KV cache of {} ({fits} tokens) would fit",
                gib(fits * self.kv_per_position)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    fn no_room(limit: usize, weights: Option<usize>) -> NoRoom {
        NoRoom {
            failed: Pool::KvCache,
            limit,
            taken: 0,
            weights,
            adapters: GIB,
            kv: 20 * GIB,
            scratch: 3 * GIB,
            kv_per_position: 1 << 20,
        }
    }

    #[test]
    fn the_parts_and_what_would_fit_are_told() {
        let text = no_room(40 * GIB, Some(30 * GIB)).to_string();
        for part in [
            "in pool kv-cache",
            "weights 30.00 GiB + adapters 1.00 GiB + KV cache 20.00 GiB + scratch 3.00 GiB",
            "are 54.00 GiB, of 40.00 GiB",
            "a KV cache of 6.00 GiB (6144 tokens) would fit",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("other processes"), "{text}");
    }

    #[test]
    fn what_others_took_is_told_apart() {
        let taken = NoRoom { taken: 5 * GIB / 2, ..no_room(40 * GIB, Some(30 * GIB)) };
        let text = taken.to_string();
        let part =
            "of 40.00 GiB that may be used (other processes and the driver took 2.50 GiB since";
        assert!(text.contains(part) && text.contains("; beside the rest"), "{text}");
    }

    #[test]
    fn where_the_rest_fills_the_device_no_cache_is_promised() {
        let text = no_room(34 * GIB, Some(30 * GIB)).to_string();
        assert!(text.contains("leaves it no room"), "{text}");
        assert!(no_room(34 * GIB, None).to_string().contains("not counted yet"));
    }
}
