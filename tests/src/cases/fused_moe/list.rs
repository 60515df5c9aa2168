//! The list of cases of both operators.

use amphora_hal::ops::{Combine, WeightOn};
use amphora_hal::{Backend, Caps, DType};

use super::{HostMoe, MoeSpec, Spread, Touch};
use crate::fixtures::Form;
use crate::harness::{Case, case};

fn list<B: Backend>(specs: Vec<MoeSpec>) -> Vec<Case<B>> {
    let make = |spec: MoeSpec| case(spec.name(), move |rng, caps| HostMoe::random(rng, caps, spec));
    specs.into_iter().map(make).collect()
}

/// Layers of more experts than most, so small that their sizes hardly matter: about the numbers up to which kernels for a
/// few, for some and for many tokens an expert hold what they count of experts, and beyond. In bf16 all of them: f16 goes
/// the same ways, f32 has one.
fn many_experts(dtype: DType) -> Vec<MoeSpec> {
    let new = |tokens, experts, top_k| MoeSpec {
        hidden: 16,
        inner: 8,
        ..MoeSpec::new(tokens, experts, top_k, dtype)
    };
    let mut specs = vec![new(70, 512, 8)];
    if dtype == DType::BF16 {
        specs.extend([
            MoeSpec { padding: 2, ..new(5, 257, 8) },
            MoeSpec { spread: Spread::Half, ..new(70, 1024, 5) },
            new(70, 895, 5),
            new(70, 894, 5),
            new(1120, 810, 32),
            new(1117, 809, 32),
            MoeSpec { padding: 3, ..new(1168, 373, 32) },
            new(1164, 372, 32),
        ]);
    }
    specs
}

/// All cases without adapters.
pub fn cases<B: Backend>(caps: &Caps) -> Vec<Case<B>> {
    let mut specs = Vec::new();
    for &dtype in caps.dtypes {
        let new = |tokens, experts, top_k| MoeSpec::new(tokens, experts, top_k, dtype);
        let swiglu = |spec| MoeSpec { clamped: false, biases: false, ..spec };
        specs.extend([
            MoeSpec { hidden: 8, inner: 4, ..new(1, 1, 1) },
            new(1, 8, 2),
            MoeSpec { padding: 3, ..new(0, 4, 2) },
            MoeSpec { padding: 3, ..new(5, 4, 4) },
            MoeSpec { spread: Spread::Same, ..new(70, 8, 1) },
            MoeSpec { spread: Spread::Same, padding: 6, ..new(35, 8, 2) },
            MoeSpec { spread: Spread::Half, ..new(19, 8, 3) },
            MoeSpec { hidden: 33, inner: 17, ..new(7, 5, 2) },
            MoeSpec { form: Form::Transposed, ..new(7, 4, 2) },
            MoeSpec { combine: Combine::Add, ..new(7, 4, 2) },
            swiglu(new(9, 16, 4)),
            swiglu(MoeSpec { form: Form::Parts(0), ..new(6, 4, 2) }),
            swiglu(MoeSpec { form: Form::Separate(0), ..new(6, 4, 2) }),
            swiglu(MoeSpec { weight_on: WeightOn::Input, combine: Combine::Add, ..new(6, 4, 1) }),
            swiglu(MoeSpec { weight_on: WeightOn::Input, biases: true, ..new(6, 4, 2) }),
            MoeSpec { hidden: 64, inner: 64, ..new(130, 32, 4) },
            MoeSpec { hidden: 136, inner: 72, ..new(200, 4, 2) },
            MoeSpec { spread: Spread::Same, padding: 9, hidden: 72, inner: 40, ..new(591, 4, 1) },
        ]);
        // Widths that a device may give to kernels of their own: whole pieces of 64, in one part or in
        // several, one of them short; and experts with more tokens than one tile has.
        let wide = |spec| MoeSpec { hidden: 128, inner: 64, ..spec };
        let wider = |spec| MoeSpec { hidden: 704, inner: 448, ..spec };
        specs.extend([
            wide(new(1, 8, 2)),
            wide(MoeSpec { padding: 2, ..new(6, 4, 3) }),
            wide(MoeSpec { spread: Spread::Same, ..new(41, 4, 2) }),
            wide(swiglu(MoeSpec { padding: 3, ..new(29, 16, 4) })),
            wide(swiglu(MoeSpec { weight_on: WeightOn::Input, biases: true, ..new(18, 8, 2) })),
            wide(MoeSpec { combine: Combine::Add, ..new(64, 8, 2) }),
            wider(new(5, 4, 2)),
            wider(swiglu(MoeSpec { spread: Spread::Half, ..new(20, 4, 2) })),
            // Three tiles of tokens an expert, and enough rows that each processor has several.
            MoeSpec { hidden: 704, inner: 1472, ..new(41, 2, 2) },
        ]);
        specs.extend(many_experts(dtype));
    }
    list(specs)
}

/// All cases with adapters.
pub fn lora_cases<B: Backend>(caps: &Caps) -> Vec<Case<B>> {
    let mut specs = Vec::new();
    for &dtype in caps.dtypes {
        let new = |tokens, experts, top_k| MoeSpec::new(tokens, experts, top_k, dtype);
        let swiglu = |spec| MoeSpec { clamped: false, biases: false, ..spec };
        specs.extend([
            MoeSpec { hidden: 8, inner: 4, ..new(1, 1, 1) }.lora(1, 1, Touch::All),
            new(1, 8, 2).lora(1, 8, Touch::All),
            MoeSpec { padding: 3, ..new(0, 4, 2) }.lora(2, 8, Touch::All),
            new(7, 4, 2).lora(3, 5, Touch::Nothing),
            new(7, 4, 2).lora(3, 4, Touch::All),
            MoeSpec { padding: 5, ..new(11, 4, 2) }.lora(3, 9, Touch::SharedA),
            new(9, 4, 2).lora(3, 4, Touch::DownOnly),
            new(9, 4, 2).lora(3, 4, Touch::GateUpOnly),
            new(9, 4, 2).lora(4, 16, Touch::OneSided),
            MoeSpec { padding: 1, ..new(16, 8, 4) }.lora(4, 33, Touch::Ragged),
            new(33, 8, 2).lora(6, 17, Touch::Ragged),
            MoeSpec { spread: Spread::Same, ..new(70, 8, 1) }.lora(2, 8, Touch::All),
            MoeSpec { spread: Spread::Half, ..new(19, 8, 3) }.lora(3, 12, Touch::Ragged),
            MoeSpec { hidden: 33, inner: 17, ..new(7, 5, 2) }.lora(3, 7, Touch::All),
            MoeSpec { combine: Combine::Add, ..new(7, 4, 2) }.lora(3, 4, Touch::SharedA),
            swiglu(new(9, 8, 3)).lora(3, 6, Touch::All),
            swiglu(MoeSpec { form: Form::Parts(0), ..new(9, 8, 2) }).lora(3, 6, Touch::SharedA),
            swiglu(MoeSpec { form: Form::Separate(0), ..new(9, 8, 2) }).lora(3, 6, Touch::All),
            swiglu(MoeSpec { weight_on: WeightOn::Input, ..new(6, 4, 1) }).lora(
                2,
                3,
                Touch::Ragged,
            ),
            new(3, 2, 1).lora(1, 256, Touch::All),
            MoeSpec { hidden: 64, inner: 64, ..new(130, 16, 4) }.lora(3, 8, Touch::Ragged),
            MoeSpec { hidden: 136, inner: 72, ..new(200, 4, 2) }.lora(9, 40, Touch::Ragged),
            MoeSpec { spread: Spread::Same, padding: 9, hidden: 72, inner: 40, ..new(591, 4, 1) }
                .lora(70, 16, Touch::SharedA),
            swiglu(MoeSpec { hidden: 72, inner: 136, ..new(150, 3, 2) }).lora(
                3,
                200,
                Touch::OneSided,
            ),
        ]);
        let wide = |spec| MoeSpec { hidden: 128, inner: 64, ..spec };
        let wider = |spec| MoeSpec { hidden: 704, inner: 448, ..spec };
        specs.extend([
            wide(new(1, 8, 2)).lora(2, 8, Touch::SharedA),
            wide(MoeSpec { padding: 2, ..new(6, 4, 3) }).lora(3, 16, Touch::All),
            wide(MoeSpec { padding: 8, ..new(0, 4, 2) }).lora(3, 16, Touch::All),
            wide(MoeSpec { padding: 90, ..new(0, 4, 2) }).lora(3, 16, Touch::All),
            wide(new(8, 4, 2)).lora(9, 33, Touch::Ragged),
            wide(new(9, 4, 2)).lora(3, 4, Touch::Nothing),
            wide(MoeSpec { spread: Spread::Same, ..new(41, 4, 2) }).lora(2, 12, Touch::Ragged),
            wide(MoeSpec { spread: Spread::Same, ..new(64, 4, 1) }).lora(40, 48, Touch::SharedA),
            wide(swiglu(MoeSpec { padding: 3, ..new(29, 16, 4) })).lora(5, 32, Touch::OneSided),
            wide(swiglu(MoeSpec { weight_on: WeightOn::Input, ..new(18, 8, 2) })).lora(
                4,
                20,
                Touch::GateUpOnly,
            ),
            wide(MoeSpec { combine: Combine::Add, ..new(64, 8, 2) }).lora(3, 64, Touch::DownOnly),
            wide(new(12, 2, 1)).lora(2, 256, Touch::Ragged),
            // Every rank that an adapter may have, and some at odd steps where kernels are for few tokens.
            MoeSpec { hidden: 24, inner: 8, ..new(500, 1, 1) }.lora(256, 256, Touch::RankBySlot),
            wide(new(60, 3, 2)).lora(43, 256, Touch::RankBySlot),
            wider(new(5, 4, 2)).lora(3, 32, Touch::SharedA),
            wider(swiglu(MoeSpec { spread: Spread::Half, ..new(20, 4, 2) })).lora(
                8,
                40,
                Touch::Ragged,
            ),
            MoeSpec { hidden: 704, inner: 1472, ..new(41, 2, 2) }.lora(3, 20, Touch::Ragged),
        ]);
        // Of two numbers beside each other the one that kernels still hold.
        let many = many_experts(dtype).into_iter().step_by(2);
        specs.extend(many.map(|spec| spec.lora(1, 9, Touch::Ragged)));
    }
    list(specs)
}
