//! Bounds and shapes → tiling block and number of cores. Pure.

use amphora_ascendc_kernels::{
    LORA_FUSED_ROWS, LORA_FUSED_SLICES, LORA_FUSED_TILES, LORA_FUSED_WIDTH, LoraFusedTiling,
    LoraSliceTiling,
};
use amphora_hal::LoraSlice;

/// Outputs of a unit are a multiple of this, so that chunks begin where vector operands may.
const WIDTH_STEP: usize = 64;

/// A dense projection, from which `lora_fused` is tiled.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Projection {
    pub(crate) tokens: usize,
    pub(crate) k: usize,
    pub(crate) n: usize,
    /// Elements from one row of x to the next.
    pub(crate) x_pitch: usize,
    /// Elements from one row of out to the next.
    pub(crate) out_pitch: usize,
    pub(crate) out_f32: bool,
    pub(crate) has_bias: bool,
}

/// What adapters add.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Deltas<'a> {
    /// Entries of the tile list.
    pub(crate) tiles: usize,
    /// Rows of one slot of the table.
    pub(crate) table_rows: usize,
    pub(crate) slices: &'a [LoraSlice],
}

/// The block and the cores to launch; or why the kernel does not take this.
pub(crate) fn lora_fused(
    of: &Projection,
    deltas: &Deltas<'_>,
    cores: usize,
) -> Result<(LoraFusedTiling, u32), &'static str> {
    if deltas.slices.len() > LORA_FUSED_SLICES {
        return Err("more than 8 slices in one projection");
    }
    if deltas.tiles > LORA_FUSED_TILES {
        return Err("more than 2048 tiles in one step");
    }
    let word = |value: usize| u32::try_from(value).map_err(|_| "a size leaves 32 bits");
    let row_tiles = of.tokens.div_ceil(LORA_FUSED_ROWS);
    // Wide units reload less of x, narrow ones give every core something to do.
    let wanted = cores.div_ceil(row_tiles.max(1)).max(1);
    let width = of.n.div_ceil(wanted).next_multiple_of(WIDTH_STEP).min(LORA_FUSED_WIDTH);
    let units = (deltas.tiles + row_tiles) * of.n.div_ceil(width);
    let mut tiling = LoraFusedTiling {
        tokens: word(of.tokens)?,
        k: word(of.k)?,
        n: word(of.n)?,
        x_pitch: word(of.x_pitch)?,
        out_pitch: word(of.out_pitch)?,
        width: word(width)?,
        tiles: word(deltas.tiles)?,
        table_rows: word(deltas.table_rows)?,
        slices: word(deltas.slices.len())?,
        out_f32: u32::from(of.out_f32),
        has_bias: u32::from(of.has_bias),
        ..LoraFusedTiling::default()
    };
    for (to, slice) in tiling.slice.iter_mut().zip(deltas.slices) {
        *to = LoraSliceTiling {
            row: word(slice.table.row())?,
            out_offset: word(slice.out_offset)?,
            out_stride: word(slice.out_stride)?,
            len: word(slice.len)?,
        };
    }
    Ok((tiling, word(units.clamp(1, cores))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn projection(tokens: usize, n: usize) -> Projection {
        Projection { tokens, k: 64, n, x_pitch: 64, out_pitch: n, ..Projection::default() }
    }

    #[test]
    fn one_token_is_spread_over_the_cores() {
        let (tiling, blocks) =
            lora_fused(&projection(1, 2880), &Deltas::default(), 40).expect("fits");
        assert_eq!((tiling.width, blocks), (128, 23));
    }

    #[test]
    fn many_tokens_take_wide_units() {
        let (tiling, blocks) =
            lora_fused(&projection(4096, 2880), &Deltas::default(), 40).expect("fits");
        assert_eq!((tiling.width, blocks), (512, 40));
    }

    #[test]
    fn no_more_cores_than_units() {
        for (tokens, n, cores) in [(1, 8, 40), (17, 65, 40), (0, 64, 40), (5, 513, 1)] {
            let (tiling, blocks) =
                lora_fused(&projection(tokens, n), &Deltas::default(), cores).expect("fits");
            let units = tokens.div_ceil(16) * n.div_ceil(tiling.width as usize);
            assert_eq!(blocks as usize, units.clamp(1, cores));
            assert!(tiling.width.is_multiple_of(8) && tiling.width as usize <= LORA_FUSED_WIDTH);
        }
    }

    #[test]
    fn what_leaves_the_kernels_buffers_is_refused() {
        let tiles = Deltas { tiles: 2049, ..Deltas::default() };
        assert!(lora_fused(&projection(1, 8), &tiles, 40).is_err());
        let huge = Projection { n: usize::MAX / 2, ..projection(1, 8) };
        assert!(lora_fused(&huge, &Deltas::default(), 40).is_err());
    }
}
