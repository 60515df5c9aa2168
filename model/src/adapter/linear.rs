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
        let path = match self.config {
            Some(config) if config.targets_parameter(&parameter) == Some(true) => &parameter,
            Some(config) if !config.targets_module(pair.path) => {
                // Where `target_parameters` is refused itself, it may have named the module.
                if config.targets_parameter(&parameter).is_some() {
                    self.reasons.push(Reason::NotTargeted { tensor: pair.a.name.to_owned() });
                }
                pair.path
            }
            _ => pair.path,
        };
        // Names of modules that the layer does not have were refused before.
        let Some((inputs, outputs)) = self.base.dims(layer, target) else {
            return;
        };
        let checked = self.check_linear(pair, path, (inputs, outputs));
        let (a, b) = (self.numbers(&pair.a), self.numbers(&pair.b));
        let (Some((rank, scale)), Some(a), Some(b)) = (checked, a, b) else {
            return;
        };
        self.layouts.per_expert |= expert.is_some();
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
        let (a, b) = (self.matrix_shape(&pair.a), self.matrix_shape(&pair.b));
        let ((rank, width), (height, columns)) = (a?, b?);
        if width != inputs {
            self.shape(&pair.a, format!("[rank, {inputs}]"));
        }
        if height != outputs {
            self.shape(&pair.b, format!("[{outputs}, rank]"));
        }
        if columns != rank {
            self.shape(&pair.b, format!("[{outputs}, {rank}], the rank of lora_A"));
        }
        let scale = self.scale(path, rank, &pair.a);
        if width != inputs || height != outputs || columns != rank {
            return None;
        }
        Some((rank, scale?))
    }
}
