//! The table of rotary cosines and sines, with YaRN's frequencies and attention factor,
//! or Llama 3.1's frequencies.
//!
//! It follows transformers step by step in f32 (frequencies, angle = position · frequency, then the
//! attention factor on both), because a frequency's last bit, times a late position, is an angle one
//! can see. Powers, cosines and sines are taken in f64 and rounded once, so that the table does not
//! depend on a platform's f32 library.

use crate::config::{Llama3Scaling, RopeConfig, RopeScaling, YarnScaling};

/// Cosines of the `head_dim / 2` frequencies, then their sines, for each position:
/// `[positions, head_dim]`, as [`amphora_hal::ops::Rope`] wants its table.
pub fn rope_table(rope: &RopeConfig, head_dim: usize, positions: usize) -> Vec<f32> {
    let frequencies = inverse_frequencies(rope, head_dim);
    let factor = match rope.scaling {
        RopeScaling::None | RopeScaling::Llama3(_) => 1.0,
        RopeScaling::Yarn(yarn) => yarn.attention_factor as f32,
    };
    let mut table = Vec::with_capacity(positions * head_dim);
    for position in 0..positions {
        let angle = |f: &f32| f64::from(position as f32 * f);
        table.extend(frequencies.iter().map(|f| angle(f).cos() as f32 * factor));
        table.extend(frequencies.iter().map(|f| angle(f).sin() as f32 * factor));
    }
    table
}

/// The `head_dim / 2` angles per position.
fn inverse_frequencies(rope: &RopeConfig, head_dim: usize) -> Vec<f32> {
    let base: Vec<f32> = (0..head_dim)
        .step_by(2)
        .map(|i| {
            let exponent = i as f32 / head_dim as f32;
            rope.theta.powf(f64::from(exponent)) as f32
        })
        .collect();
    match rope.scaling {
        RopeScaling::None => base.iter().map(|f| 1.0 / f).collect(),
        RopeScaling::Yarn(yarn) => yarn_frequencies(&yarn, rope.theta, head_dim, &base),
        RopeScaling::Llama3(llama3) => {
            base.iter().map(|f| llama3_frequency(&llama3, 1.0 / f)).collect()
        }
    }
}

/// Llama 3.1's rule (Grattafiori et al. 2024, arXiv 2407.21783; its formula is that of Meta's
/// reference code): frequencies that turn often over the original context are kept, those that turn
/// seldom are divided by the factor, with a linear ramp between.
fn llama3_frequency(scaling: &Llama3Scaling, frequency: f32) -> f32 {
    let (low, high) = (scaling.low_freq_factor as f32, scaling.high_freq_factor as f32);
    let (factor, original) = (scaling.factor as f32, scaling.original_positions as f32);
    let wavelength = 2.0 * std::f32::consts::PI / frequency;
    if wavelength > original / low {
        frequency / factor
    } else if wavelength < original / high {
        frequency
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

/// Peng et al. 2023, section 3.2: fast frequencies are kept, slow ones divided by the factor, with
/// a linear ramp between.
fn yarn_frequencies(yarn: &YarnScaling, theta: f64, head_dim: usize, base: &[f32]) -> Vec<f32> {
    let dim = head_dim as f64;
    // The dimension whose frequency makes `turns` turns over the original context.
    let dimension_of = |turns: f64| {
        let positions = yarn.original_positions as f64;
        dim * (positions / (turns * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln())
    };
    let (mut low, mut high) = (dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let low = low.max(0.0);
    let mut high = high.min(dim - 1.0);
    if low == high {
        high += 0.001; // The ramp must not divide by zero.
    }
    let (low, width) = (low as f32, (high - low) as f32);
    base.iter()
        .enumerate()
        .map(|(i, f)| {
            let ramp = ((i as f32 - low) / width).clamp(0.0, 1.0);
            let keep = 1.0 - ramp;
            let stretched = 1.0 / (yarn.factor as f32 * f);
            stretched * (1.0 - keep) + (1.0 / f) * keep
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn(factor: f64, original_positions: usize, truncate: bool) -> RopeConfig {
        RopeConfig {
            theta: 150_000.0,
            scaling: RopeScaling::Yarn(YarnScaling {
                factor,
                original_positions,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate,
                attention_factor: 0.1 * factor.ln() + 1.0,
            }),
        }
    }

    struct Stored {
        rope: RopeConfig,
        head_dim: usize,
        position: usize,
        frequencies: [usize; 8],
        cos: [f32; 8],
        sin: [f32; 8],
    }

    /// Values of transformers 5.24's `GptOssRotaryEmbedding`.
    #[test]
    fn the_table_is_that_of_transformers() {
        let all = [0, 1, 2, 3, 4, 5, 6, 7];
        let cases = [
            Stored {
                rope: yarn(8.0, 32, false),
                head_dim: 16,
                position: 200,
                frequencies: all,
                cos: [
                    0.588_495_5,
                    -1.090_978_9,
                    0.357_507_9,
                    1.158_756_1,
                    1.205_428_5,
                    1.207_816_2,
                    1.207_937_7,
                    1.207_943_9,
                ],
                sin: [
                    -1.054_894_3,
                    0.518_55,
                    1.153_827_2,
                    0.341_193_7,
                    0.077_918_33,
                    0.017_575_776,
                    0.003_962_029,
                    0.000_893_114_1,
                ],
            },
            Stored {
                rope: yarn(4.0, 2048, true),
                head_dim: 16,
                position: 200,
                frequencies: all,
                cos: [
                    0.554_726_24,
                    0.515_156_3,
                    0.261_788_67,
                    0.469_868_12,
                    1.129_154,
                    1.138_147_4,
                    1.138_604_9,
                    1.138_628_2,
                ],
                sin: [
                    -0.994_362,
                    1.015_426_5,
                    1.108_126_2,
                    1.037_160_1,
                    0.146_588_45,
                    0.033_130_962,
                    0.007_469_316_5,
                    0.001_683_729_7,
                ],
            },
            Stored {
                rope: RopeConfig { theta: 10_000.0, scaling: RopeScaling::None },
                head_dim: 16,
                position: 37,
                frequencies: all,
                cos: [
                    0.765_414_06,
                    0.647_921_7,
                    -0.848_1,
                    0.390_112_3,
                    0.932_327_3,
                    0.993_162_8,
                    0.999_315_56,
                    0.999_931_6,
                ],
                sin: [
                    -0.643_538_1,
                    -0.761_706_95,
                    -0.529_836_2,
                    0.920_767_3,
                    0.361_615_45,
                    0.116_737_5,
                    0.036_991_56,
                    0.011_700_161,
                ],
            },
            Stored {
                rope: yarn(32.0, 4096, false),
                head_dim: 64,
                position: 200,
                frequencies: [0, 4, 8, 13, 17, 22, 26, 31],
                cos: [
                    0.656_034_05,
                    0.609_237_6,
                    -0.996_327_7,
                    0.964_775_3,
                    1.346_123_2,
                    1.346_571_6,
                    1.346_573_5,
                    1.346_573_6,
                ],
                sin: [
                    -1.175_959,
                    1.200_870_5,
                    -0.905_865_1,
                    0.939_398_17,
                    0.034_823_544,
                    0.002_325_665,
                    0.000_524_247_07,
                    0.000_081_427_61,
                ],
            },
        ];
        for case in cases {
            let table = rope_table(&case.rope, case.head_dim, case.position + 1);
            let row = &table[case.position * case.head_dim..];
            for (i, frequency) in case.frequencies.into_iter().enumerate() {
                let (cos, sin) = (row[frequency], row[case.head_dim / 2 + frequency]);
                // Position 200 turns one unit in the last place of a frequency into 2e-5.
                assert!((cos - case.cos[i]).abs() < 3e-5, "cos {i} of {:?}", case.rope);
                assert!((sin - case.sin[i]).abs() < 3e-5, "sin {i} of {:?}", case.rope);
            }
        }
    }
}
