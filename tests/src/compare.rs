//! When a backend's answer is right.
//!
//! A bound belongs to an operator and a type, never to a backend. Let u be half a unit in the last
//! place of the type: 2^-24 for f32, 2^-11 for f16, 2^-8 for bf16. An element may be off by
//!
//! `relative · |want| + of_scale · s`, where s is the root mean square of the wanted elements,
//!
//! and the mean square error over the mean square (NMSE) may be at most `nmse`. The two catch
//! different mistakes: the worst element one wrong index, the NMSE a lost precision everywhere. Where
//! an output lies among its type's subnormal numbers, which are spaced evenly, half that spacing is
//! allowed too: only f16's (2^-24) is large enough to matter. And 2^-118 is allowed everywhere: below,
//! arithmetic in f32 may leave the normal numbers on its way. A sigmoid at −89 divides by an exponential
//! beyond f32, so it is 0 where the exact value is 2^-128; what it is multiplied with is large where `swiglu`'s gates are, and
//! its oracle allows 2^-126 of that.
//!
//! An activation's result that is an operand of the next product is rounded by the oracle as by a backend. One
//! within 1e-5 of a tie, which is what sums in f32 may be off by, may be rounded to the other side: then every
//! output is off by a whole unit of that operand times its weight with the delta's, which the scale of the outputs
//! does not bound (an operand of 2.3 in f16 and a weight of −1.25 moved an output of 0.55 by 2.4e-3). The oracle
//! looks for such operands and allows just that much at the outputs that they move.
//!
//! | operators | relative | of_scale | nmse | why |
//! |---|---|---|---|---|
//! | moves (write_tokens, embed, kv_write, gather_rows, copy_blocks) | 0 | 0 | 0 | nothing is computed: same bits |
//! | rms_norm, rope, linear | u + 1e-5 | 1e-5 | u² + 1e-11 | an f32 sum (relative 1e-7·√k of the sum's own scale), one rounding |
//! | swiglu | u + 1e-5 | 1e-5 | u² + 1e-11 | an exponential and a division in f32, one rounding; f16 has subnormals |
//! | rms_norm with add | 3u + 1e-5 | 1e-5 | 4u² + 1e-11 | the residual is rounded first; f32 and f64 may round a tie apart |
//! | paged_attention | u + 1e-5 | u + 1e-5 | 2u² + 1e-11 | probabilities may be rounded once, as operands of a matrix unit |
//! | lora_linear | u + 1e-5 | u + 1e-5 | 2u² + 1e-11 | so may the rank-r intermediate |
//! | moe_route | 1e-5 | 0 | 1e-11 | f32 throughout |
//! | fused_moe, fused_moe_lora | 2u + 2e-5 | 2u + 2e-5 | 4u² + 1e-11 | the activation, and a weighted input, are rounded as operands; ties below |
//! | sample, logprobs | 1e-5 | 1e-5 | 1e-11 | a log-probability: f32 sums over the vocabulary |

use amphora_hal::{DType, OpKind};

use crate::host::HostTensor;

/// What an element must be after the run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Want {
    /// What it was before, bit for bit.
    Same,
    /// Near this number, by the operator's tolerance.
    Near(f64),
    /// Near the first number, and up to the second further off where operands may be rounded to either
    /// side of a tie.
    NearTies(f64, f64),
    /// Near the first number, and up to the second further off, since a factor may leave f32's range on the
    /// way: which loses no precision, so it is not counted with the squares.
    NearRange(f64, f64),
    /// This integer.
    Int(i32),
    /// The bits of an f32 near this number, in an integer tensor.
    Bits(f64),
    /// The contract gives it no value.
    Any,
}

/// A bound; see the module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Of the wanted element.
    pub relative: f64,
    /// Of the root mean square of all wanted elements.
    pub of_scale: f64,
    /// Mean square error over mean square.
    pub nmse: f64,
}

impl Tolerance {
    /// The same bits as numbers go (−0 is 0).
    pub const EXACT: Tolerance = Tolerance { relative: 0.0, of_scale: 0.0, nmse: 0.0 };

    /// How far two answers may lie apart, each of which may be off by this: by the sum of both, as errors
    /// may point either way. (Roots of mean squares add up so, too; their square is the NMSE.) Two right
    /// answers to either side of a tie are a whole unit apart when they are rounded.
    pub fn between_two(self) -> Tolerance {
        let Tolerance { relative, of_scale, nmse } = self;
        Tolerance { relative: 2.0 * relative, of_scale: 2.0 * of_scale, nmse: 4.0 * nmse }
    }
}

/// Half a unit in the last place, relative.
pub fn half_ulp(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2f64.powi(-24),
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        DType::I32 | DType::U8 => 0.0,
    }
}

/// What a computed number may be off by however small it is: half the distance of two of f16's subnormal
/// numbers, and for types of f32's range what may be lost at its end.
fn least(dtype: DType) -> f64 {
    match dtype {
        DType::F32 | DType::BF16 => 2f64.powi(-118),
        DType::F16 => 2f64.powi(-25),
        DType::I32 | DType::U8 => 0.0,
    }
}

/// The bound of `op` where its output has type `dtype`; the table above.
pub fn tolerance(op: OpKind, dtype: DType) -> Tolerance {
    let u = half_ulp(dtype);
    let bound = |relative, of_scale, squares: f64| Tolerance {
        relative,
        of_scale,
        nmse: squares * u * u + 1e-11,
    };
    match op {
        OpKind::WriteTokens
        | OpKind::Embed
        | OpKind::KvWrite
        | OpKind::GatherRows
        | OpKind::CopyBlocks => Tolerance::EXACT,
        OpKind::Rope | OpKind::Linear => bound(u + 1e-5, 1e-5, 1.0),
        OpKind::Swiglu => bound(u + 1e-5, 1e-5, 1.0),
        OpKind::RmsNorm => bound(3.0 * u + 1e-5, 1e-5, 4.0),
        OpKind::PagedAttention | OpKind::LoraLinear => bound(u + 1e-5, u + 1e-5, 2.0),
        OpKind::MoeRoute => bound(1e-5, 0.0, 0.0),
        OpKind::FusedMoe | OpKind::FusedMoeLora => bound(2.0 * u + 2e-5, 2.0 * u + 2e-5, 4.0),
        OpKind::Sample | OpKind::Logprobs => bound(1e-5, 1e-5, 0.0),
    }
}

/// Holds a tensor after the run against `wants`.
///
/// # Errors
/// The first wrong element, or the NMSE, in one line.
pub fn compare(
    before: &HostTensor,
    after: &HostTensor,
    wants: &[Want],
    tolerance: Tolerance,
) -> Result<(), String> {
    if wants.len() != after.elements() {
        return Err(format!("{} wanted values for {:?}", wants.len(), after.dims));
    }
    let size = after.dtype.size();
    let (mut squares, mut errors, mut count) = (0.0, 0.0, 0usize);
    for (i, want) in wants.iter().enumerate() {
        let numbers = match *want {
            Want::NearRange(want, lost) if (after.value(i) - want).abs() <= lost => (want, want),
            Want::Near(want) | Want::NearTies(want, _) | Want::NearRange(want, _) => {
                (after.value(i), want)
            }
            Want::Bits(want) => (f64::from(f32::from_bits(after.int(i) as u32)), want),
            Want::Same
                if after.bytes[i * size..(i + 1) * size]
                    != before.bytes[i * size..(i + 1) * size] =>
            {
                return Err(format!("{} changed to {}", place(after, i), after.value(i)));
            }
            Want::Int(want) if after.int(i) != want => {
                return Err(format!("{} is {}, not {want}", place(after, i), after.int(i)));
            }
            Want::Same | Want::Int(_) | Want::Any => continue,
        };
        // The same infinity is no error, and no scale.
        if numbers.0 == numbers.1 && numbers.1.is_infinite() {
            continue;
        }
        squares += numbers.1 * numbers.1;
        errors += (numbers.0 - numbers.1).powi(2);
        count += 1;
    }
    if count == 0 {
        return Ok(());
    }
    let scale = (squares / count as f64).sqrt();
    // What must be exact stays so.
    let least = if tolerance == Tolerance::EXACT { 0.0 } else { least(after.dtype) };
    let mut worst: Option<(f64, String)> = None;
    for (i, want) in wants.iter().enumerate() {
        let (got, want, more) = match *want {
            Want::Near(want) => (after.value(i), want, 0.0),
            Want::NearTies(want, more) | Want::NearRange(want, more) => {
                (after.value(i), want, more)
            }
            Want::Bits(want) => (f64::from(f32::from_bits(after.int(i) as u32)), want, 0.0),
            Want::Same | Want::Int(_) | Want::Any => continue,
        };
        if got == want {
            continue;
        }
        let allowed = tolerance.relative * want.abs() + tolerance.of_scale * scale + more + least;
        let error = (got - want).abs();
        // Against an infinity every bound is infinite, so nothing but that infinity is right.
        if error > allowed || !error.is_finite() {
            let excess =
                if error.is_finite() { error / allowed.max(1e-300) } else { f64::INFINITY };
            let text = format!(
                "{} is {got}, not {want} (off by {error:.3e}, allowed {allowed:.3e})",
                place(after, i)
            );
            if worst.as_ref().is_none_or(|(most, _)| excess > *most) {
                worst = Some((excess, text));
            }
        }
    }
    if let Some((_, text)) = worst {
        return Err(text);
    }
    let nmse = errors / squares.max(1e-300);
    let allowed = tolerance.nmse + (least / scale.max(1e-150)).powi(2);
    if nmse > allowed {
        return Err(format!("NMSE {nmse:.3e}, allowed {allowed:.3e}"));
    }
    Ok(())
}

/// The element's indices, as `[2, 5]`.
fn place(tensor: &HostTensor, mut i: usize) -> String {
    let mut indices: Vec<usize> = tensor
        .dims
        .iter()
        .rev()
        .map(|&extent| {
            let index = i % extent;
            i /= extent;
            index
        })
        .collect();
    indices.reverse();
    format!("{indices:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f64]) -> HostTensor {
        HostTensor::real(&[values.len()], DType::F32, values)
    }

    #[test]
    fn one_wrong_element_is_named() {
        let linear = tolerance(OpKind::Linear, DType::F32);
        let wants = [Want::Near(1.0), Want::Near(2.0)];
        assert_eq!(compare(&tensor(&[0.0; 2]), &tensor(&[1.0, 2.0]), &wants, linear), Ok(()));
        let error = compare(&tensor(&[0.0; 2]), &tensor(&[1.0, 2.1]), &wants, linear);
        assert!(error.expect_err("off by 0.1").starts_with("[1] is 2.09"));
    }

    /// As an H200 answered, with rows split over blocks and with tiles of rows.
    #[test]
    fn two_right_answers_may_be_a_whole_unit_apart() {
        let attention = tolerance(OpKind::PagedAttention, DType::F16);
        let f16 = |values: &[f64]| HostTensor::real(&[2], DType::F16, values);
        let (tiles, split) = (f16(&[0.5244140625, 0.25]), [0.52392578125, 0.25].map(Want::Near));
        let held = |tolerance| compare(&f16(&[0.0; 2]), &tiles, &split, tolerance);
        assert!(held(attention).is_err() && held(attention.between_two()).is_ok());
        let apart = f16(&[0.52392578125 + 3.0 * 2f64.powi(-11), 0.25]);
        assert!(compare(&f16(&[0.0; 2]), &apart, &split, attention.between_two()).is_err());
        assert_eq!(Tolerance::EXACT.between_two(), Tolerance::EXACT);
    }

    #[test]
    fn what_a_tie_moves_is_allowed_where_it_moves_it() {
        let moe = tolerance(OpKind::FusedMoeLora, DType::F32);
        let wants = [Want::NearTies(1.0, 0.5), Want::NearTies(1.0, 0.0)];
        let held = |values: &[f64]| compare(&tensor(&[0.0; 2]), &tensor(values), &wants, moe);
        assert!(held(&[1.75, 1.0]).expect_err("beyond").starts_with("[0] is 1.75"));
        assert!(held(&[1.0, 1.5]).expect_err("no tie").starts_with("[1] is 1.5"));
        // Everywhere at once it would still be a lost precision.
        assert!(held(&[1.5, 1.0]).expect_err("NMSE").starts_with("NMSE"));
    }

    #[test]
    fn what_leaves_the_range_is_allowed_alone_and_is_no_lost_precision() {
        let swiglu = tolerance(OpKind::Swiglu, DType::BF16);
        let held = |value, lost| {
            compare(&tensor(&[0.0]), &tensor(&[value]), &[Want::NearRange(-2.7e-39, lost)], swiglu)
        };
        // A gate of -97.6 and an up of 68 through a sigmoid that is kept at e^-88.
        assert_eq!(held(-4e-35, 6600.0 * f64::from(f32::MIN_POSITIVE)), Ok(()));
        assert!(held(-4e-35, 1e-36).is_err());
        assert!(held(f64::NAN, 1e-30).is_err());
    }

    #[test]
    fn f16_may_round_to_the_next_subnormal_number() {
        let swiglu = tolerance(OpKind::Swiglu, DType::F16);
        let f16 = |value: f64| HostTensor::real(&[1], DType::F16, &[value]);
        let step = 2f64.powi(-24);
        assert_eq!(compare(&f16(0.0), &f16(step), &[Want::Near(step * 1.4)], swiglu), Ok(()));
        assert!(compare(&f16(0.0), &f16(2.0 * step), &[Want::Near(step * 1.4)], swiglu).is_err());
        let exact = Tolerance::EXACT;
        assert!(compare(&f16(0.0), &f16(step), &[Want::Near(step * 1.4)], exact).is_err());
    }

    #[test]
    fn what_leaves_the_range_of_f32_may_be_zero() {
        for dtype in [DType::F32, DType::BF16] {
            let swiglu = tolerance(OpKind::Swiglu, dtype);
            let number = |value: f64| HostTensor::real(&[1], dtype, &[value]);
            let of = |want: f64| compare(&number(1.0), &number(0.0), &[Want::Near(want)], swiglu);
            assert_eq!(of(3.839e-40), Ok(()));
            assert!(of(1e-34).is_err());
        }
    }

    #[test]
    fn nan_and_changed_bits_are_wrong() {
        let linear = tolerance(OpKind::Linear, DType::F32);
        let nan = tensor(&[f64::NAN]);
        assert!(compare(&nan, &nan, &[Want::Near(1.0)], linear).is_err());
        assert!(compare(&nan, &nan, &[Want::Same], linear).is_ok(), "the same NaN");
        assert!(compare(&nan, &nan, &[Want::Any], linear).is_ok());
        assert!(compare(&tensor(&[0.0]), &tensor(&[-0.0]), &[Want::Same], linear).is_err());
        let low = tensor(&[f64::NEG_INFINITY, 1.0]);
        let wants = [Want::Near(f64::NEG_INFINITY), Want::Near(1.0)];
        assert_eq!(compare(&low, &low, &wants, linear), Ok(()), "the same infinity");
        assert!(compare(&low, &tensor(&[-1e30, 1.0]), &wants, linear).is_err());
        assert!(compare(&low, &tensor(&[f64::INFINITY, 1.0]), &wants, linear).is_err());
    }

    #[test]
    fn an_error_everywhere_is_caught_though_each_is_small() {
        let linear = tolerance(OpKind::Linear, DType::F32);
        let got = tensor(&[1.0 + 9e-6; 8]);
        let error = compare(&got, &got, &[Want::Near(1.0); 8], linear);
        assert!(error.expect_err("NMSE").starts_with("NMSE"));
    }
}
