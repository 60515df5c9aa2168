//! The inner loops, once, over lanes: portable, AVX2 and AVX-512, chosen when the device opens.
//!
//! Every sum has one order that depends on nothing but its length: a product adds k in order into
//! one lane; a dot adds its lanes' partial sums in one tree. Row blocking, blocks of k and threads
//! never change it. (The dot products of bf16 pairs that some CPUs have are not used: on those tried they run
//! at half the rate of f32.)

mod attend;
mod lanes;
mod math;
mod product;

pub(crate) use attend::{Keys, QUERIES, scores, weigh};
pub(crate) use lanes::Widen;
pub(crate) use math::{
    Turn, activate, add, add_scaled, divide, exp, exp_less, largest, narrow, rms, scale, turn,
    widen,
};
pub(crate) use product::{Panels, pack_panel, panel_elements, product};

/// What the machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// All that this machine has, the best last.
    pub(crate) fn all() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut levels = vec![Level::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                levels.push(Level::Avx2);
            }
            let wide = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if wide && levels.contains(&Level::Avx2) {
                levels.push(Level::Avx512);
            }
        }
        levels
    }

    pub(crate) fn detect() -> Self {
        Self::all().pop().unwrap_or(Level::Portable)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        }
    }
}

/// A function compiled once for each level, with `$V` standing for its 16 lanes; its first argument chooses.
///
/// A closure handed to a function with target features would be compiled without them, so each level is
/// a function of its own around one that is always inlined.
macro_rules! levels {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident<$V:ident $(, $G:ident: $bound:ident)*>(
            $($arg:ident: $type:ty),* $(,)?
        ) $(-> $out:ty)? $body:block
    ) => {
        $(#[$meta])*
        $vis fn $name<$($G: $bound),*>(level: $crate::simd::Level, $($arg: $type),*) $(-> $out)? {
            #[inline(always)]
            fn with<$V: $crate::simd::lanes::Lanes $(, $G: $bound)*>(
                $($arg: $type),*
            ) $(-> $out)? $body

            /// # Safety
            /// The CPU has AVX2 and FMA.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2<$($G: $bound),*>($($arg: $type),*) $(-> $out)? {
                with::<$crate::simd::lanes::x86::Y16 $(, $G)*>($($arg),*)
            }

            /// # Safety
            /// The CPU has AVX-512 F, DQ and VL, AVX2 and FMA.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512vl,avx2,fma")]
            unsafe fn avx512<$($G: $bound),*>($($arg: $type),*) $(-> $out)? {
                with::<$crate::simd::lanes::x86::Z16 $(, $G)*>($($arg),*)
            }

            match level {
                $crate::simd::Level::Portable => with::<[f32; 16] $(, $G)*>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Level::Avx2 => {
                    // SAFETY: `Level::all` gives this level only where the CPU has them.
                    unsafe { avx2::<$($G),*>($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Level::Avx512 => {
                    // SAFETY: `Level::all` gives this level only where the CPU has them.
                    unsafe { avx512::<$($G),*>($($arg),*) }
                }
            }
        }
    };
}
use levels;

/// Runs `body` compiled for the widest vectors there are. Only what is inlined into it gains; nothing is
/// contracted, so its bits are the same at every level.
#[inline(always)]
pub(crate) fn widest<R>(level: Level, body: impl FnOnce() -> R) -> R {
    match level {
        Level::Portable => body(),
        // SAFETY: `Level::all` gives these only where the CPU has the instructions.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { lanes::x86::avx2_fma(body) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { lanes::x86::avx512(body) },
    }
}

#[cfg(test)]
pub(crate) fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747796405) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}
