//! The list of cases of both operators.

use amphora_hal::ops::{Combine, WeightOn};
use amphora_hal::{Backend, Caps};

use super::{HostMoe, MoeSpec, Spread, Touch};
use crate::fixtures::Form;
use crate::harness::{Case, case};

fn list<B: Backend>(specs: Vec<MoeSpec>) -> Vec<Case<B>> {
    let make = |spec: MoeSpec| case(spec.name(), move |rng, caps| HostMoe::random(rng, caps, spec));
    specs.into_iter().map(make).collect()
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
        ]);
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
        ]);
    }
    list(specs)
}
