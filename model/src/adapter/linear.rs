//! Pairs of Linear modules: attention projections, the router, and experts written one by one.

use std::collections::BTreeMap;

use super::names::Module;
use super::read::{Assembly, Pair};
use super::reason::Reason;
use super::{Matrix, ModuleFactor, Target};

impl<'a> Assembly<'a> {
    pub(super) fn add_linears(&mut self, pairs: &BTreeMap<Module, Pair<'a>>) {
        for (module, pair) in pairs {
            if let Module::Linear { layer, target, expert } = *module {
                self.add_linear(pair, layer, target, expert);
            }
        }
    }

    fn add_linear(&mut self, pair: &Pair<'a>, layer: usize, target: Target, expert: Option<usize>) {
        // A 2-D parameter's pattern name ends in the parameter's own name.
        let parameter = format!("{}.weight", pair.path);
        let path = if self.config.targets_parameter(&parameter) {
            parameter.as_str()
        } else if self.config.targets_module(pair.path) {
            pair.path
        } else {
            self.reasons.push(Reason::NotTargeted { tensor: pair.a.name.to_owned() });
            return;
        };
        // Names of modules that the layer does not have were refused before.
        let Some((inputs, outputs)) = self.base.dims(layer, target) else {
            return;
        };
        let Some((rank, scale)) = self.check_linear(pair, path, (inputs, outputs)) else {
            return;
        };
        let (Some(a), Some(b)) = (self.numbers(&pair.a), self.numbers(&pair.b)) else {
            return;
        };
        self.shrinks.push(Matrix { rows: rank, cols: inputs, data: a });
        self.modules.push(ModuleFactor {
            layer,
            target,
            expert,
            rank,
            scale,
            shrink: self.shrinks.len() - 1,
            b: Matrix { rows: outputs, cols: rank, data: b },
        });
    }

    fn check_linear(
        &mut self,
        pair: &Pair<'a>,
        path: &str,
        (inputs, outputs): (usize, usize),
    ) -> Option<(usize, f32)> {
        let (rank, width) = self.matrix_shape(&pair.a)?;
        let (height, columns) = self.matrix_shape(&pair.b)?;
        if width != inputs {
            self.shape(&pair.a, format!("[rank, {inputs}]"));
        }
        if height != outputs {
            self.shape(&pair.b, format!("[{outputs}, rank]"));
        }
        if columns != rank {
            self.shape(&pair.b, format!("[{outputs}, {rank}], the rank of lora_A"));
        }
        if width != inputs || height != outputs || columns != rank {
            return None;
        }
        Some((rank, self.scale(path, rank, &pair.a)?))
    }
}
