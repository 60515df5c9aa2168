//! Cases of `moe_route`: the choice, its weights, one permutation and two lists of tiles.

use amphora_hal::ops::{ExpertGroups, MoeRoute, RouteScore, RoutingShape};
use amphora_hal::{Backend, Caps, DType, OpBounds, OpKey, OpKind, Result, Segments};

use crate::compare::Want;
use crate::harness::{ByRow, Case, Expect, HostOp, Launch, case};
use crate::host::{HostTensor, POISON};
use crate::oracle::moe_route::{Route, sorted_pairs};
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{Step, limits, rows_bucket};

/// A difference in f64 below which f32 may decide otherwise; inputs that near are drawn again.
const MARGIN: f64 = 1e-4;

/// Sizes and variants of a call.
#[derive(Debug, Clone, Copy)]
pub struct RouteSpec {
    /// Rows.
    pub tokens: usize,
    /// Rows of the bucket beyond them.
    pub padding: usize,
    /// Rows of the memory beyond the bucket.
    pub spare: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Adapter slots.
    pub slots: usize,
    /// Logits to weights.
    pub score: RouteScore,
    /// With a correction of the choice.
    pub correction: bool,
    /// Choice by groups.
    pub groups: Option<ExpertGroups>,
    /// Divide by the sum of the chosen.
    pub renorm: bool,
    /// Multiplies the weights.
    pub scale: f32,
    /// What the logits are.
    pub logits: Logits,
}

/// What the logits are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// Normal numbers.
    Random,
    /// Equal values everywhere: the lower index wins.
    Ties,
    /// Every token's first choice is the same expert, its others random.
    OneTakesAll,
    /// Infinite, and no numbers, among them; every third token has no number at all.
    Odd,
}

impl RouteSpec {
    /// gpt_oss's form.
    pub fn new([tokens, experts, top_k, slots]: [usize; 4]) -> Self {
        RouteSpec {
            tokens,
            padding: 0,
            spare: 0,
            experts,
            top_k,
            slots,
            score: RouteScore::SoftmaxTopk,
            correction: false,
            groups: None,
            renorm: false,
            scale: 1.0,
            logits: Logits::Random,
        }
    }

    /// What a case of it is called.
    pub fn name(&self) -> String {
        let RouteSpec { tokens, padding, experts, top_k, slots, score, .. } = self;
        let mut name = format!(
            "moe_route/f32/t={tokens}+{padding},e={experts},k={top_k},slots={slots},{score:?}"
        );
        if self.correction {
            name += ",correction";
        }
        if let Some(ExpertGroups { groups, keep, best }) = self.groups {
            name += &format!(",groups={keep}of{groups}by{best}");
        }
        if self.renorm {
            name += ",renorm";
        }
        if self.scale != 1.0 {
            name += ",scaled";
        }
        if self.logits != Logits::Random {
            name += &format!(",{:?}", self.logits);
        }
        if self.spare > 0 {
            name += ",bucket";
        }
        name.to_lowercase()
    }

    fn shape(&self, caps: &Caps) -> RoutingShape {
        RoutingShape {
            tokens: self.tokens + self.padding + self.spare,
            top_k: self.top_k,
            experts: self.experts,
            slots: self.slots,
            tile_rows: caps.tile_rows,
        }
    }
}

/// One call.
#[derive(Debug, Clone)]
pub struct HostMoeRoute {
    spec: RouteSpec,
    shape: RoutingShape,
    steps: Vec<Step>,
    logits: HostTensor,
    correction: Option<Vec<f64>>,
}

impl HostMoeRoute {
    /// Random operands.
    pub fn random(rng: &mut Rng, caps: &Caps, spec: RouteSpec) -> Self {
        let bucket = spec.tokens + spec.padding;
        let plan = limits(rows_bucket(bucket), spec.slots, caps.tile_rows);
        let mut step = |tokens: usize| {
            let slots: Vec<_> =
                (0..tokens).map(|_| rng.below(spec.slots + 1).checked_sub(1)).collect();
            Step::of_rows(&slots, bucket, plan)
        };
        let steps = vec![step(spec.tokens), step(spec.tokens.div_ceil(2))];
        let mut op = HostMoeRoute {
            spec,
            shape: spec.shape(caps),
            steps,
            logits: HostTensor::poison(&[bucket, spec.experts], DType::F32),
            correction: spec.correction.then(|| rng.normals(spec.experts, 0.3, DType::F32)),
        };
        let rows: Vec<f64> = (0..bucket).flat_map(|row| op.random_row(rng, row)).collect();
        op.logits = HostTensor::real(&[bucket, spec.experts], DType::F32, &rows);
        op
    }

    fn random_row(&self, rng: &mut Rng, number: usize) -> Vec<f64> {
        let RouteSpec { experts, logits, .. } = self.spec;
        loop {
            let mut row = rng.normals(experts, 1.5, DType::F32);
            match logits {
                Logits::Random => {}
                Logits::Ties => row.iter_mut().for_each(|v| *v = v.round() / 2.0),
                Logits::OneTakesAll => row[experts / 2] = 9.0,
                Logits::Odd if number % 3 == 1 => row.fill(f64::NAN),
                Logits::Odd => row.iter_mut().for_each(|value| {
                    let odd = [f64::NAN, f64::NEG_INFINITY, f64::INFINITY];
                    // Half of the other rows has no infinite weight.
                    let odd = &odd[..2 + usize::from(number.is_multiple_of(3))];
                    *value = if rng.below(4) == 0 { rng.pick(odd) } else { *value };
                }),
            }
            if self.route().choose(&row).margin > MARGIN {
                return row;
            }
        }
    }

    fn route(&self) -> Route<'_> {
        let RouteSpec { experts, top_k, score, groups, renorm, scale, .. } = self.spec;
        let correction = self.correction.as_deref();
        Route { experts, top_k, score, correction, groups, renorm, scale: f64::from(scale) }
    }
}

impl HostOp for HostMoeRoute {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::MoeRoute, DType::F32)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let RoutingShape { tokens, top_k, experts, .. } = self.shape;
        let op = Some(OpKind::MoeRoute);
        vec![OpBounds { op, tokens, top_k, experts, ..OpBounds::default() }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let RouteSpec { experts, score, groups, renorm, scale, .. } = self.spec;
        let logits = rig.tensor("logits", &self.logits)?;
        let correction = match &self.correction {
            Some(values) => {
                let values = HostTensor::real(&[experts], DType::F32, values);
                Some(rig.tensor("correction", &values)?)
            }
            None => None,
        };
        let mut routing = rig.routing(self.shape)?.bucket(self.logits.dims[0])?;
        Ok(Box::new(move |cx, plan| {
            MoeRoute {
                logits: &logits,
                live: plan.kv_index(),
                slot: plan.slot(),
                score,
                correction: correction.as_ref(),
                groups,
                renorm,
                scale,
                routing: &mut routing,
            }
            .run(cx)
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let step = &self.steps[step];
        let (top_k, spare) = (self.spec.top_k, self.spec.spare);
        let slots = step.slots();
        let values = self.logits.values();
        let rows = values.chunks(self.spec.experts);
        let (mut chosen, mut weights) = (Vec::new(), Vec::new());
        for (row, &live) in rows.zip(&step.kv_index()) {
            let choice = self.route().choose(row);
            let live = live >= 0;
            chosen.extend(choice.experts.into_iter().map(|e| live.then_some(e)));
            let known = |w: &f64| live && !w.is_nan();
            weights.extend(
                choice.weights.iter().map(|w| if known(w) { Want::Near(*w) } else { Want::Any }),
            );
        }
        let pairs = sorted_pairs(&chosen, &slots, top_k);
        let number = |value: Option<usize>| Want::Int(value.map_or(-1, |v| v as i32));
        let padded = |mut wants: Vec<Want>| {
            wants.resize(wants.len() + spare * top_k, Want::Same);
            Expect::Elements(wants)
        };
        let perm = (0..chosen.len()).map(|i| number(pairs.get(i).copied())).collect();
        let experts = padded(chosen.iter().map(|e| number(*e)).collect());
        let of_pair = |lora: bool| {
            let pairs = pairs.clone();
            let group = |&pair: &usize| {
                let slot = slots[pair / top_k].map_or(-1, |slot| slot as i32);
                (chosen[pair].map_or(-1, |e| e as i32), if lora { slot } else { -1 })
            };
            let RoutingShape { experts, slots, tile_rows, .. } = self.shape;
            let groups = if lora { experts * slots } else { experts };
            let list = TileList {
                groups: pairs.iter().map(group).collect(),
                tile_rows,
                tiles: Segments::bound(chosen.len(), groups, tile_rows),
                lora,
            };
            Expect::Judged(Box::new(move |tiles| list.judge(tiles)))
        };
        vec![
            ("routing.experts", experts),
            ("routing.weights", padded(weights)),
            ("routing.perm", padded(perm)),
            ("routing.tiles", of_pair(false)),
            ("routing.lora_tiles", of_pair(true)),
        ]
    }
}

impl ByRow for HostMoeRoute {
    const OUTPUTS: &'static [&'static str] = &["routing.experts", "routing.weights"];

    fn rows(&self) -> usize {
        self.steps[0].rows()
    }

    fn of_rows(&self, rows: &[usize]) -> Self {
        let mut op = self.clone();
        op.steps = vec![self.steps[0].of_single_rows(rows)];
        op.logits = self.logits.of_rows(rows);
        op.shape.tokens = rows.len() + self.spec.spare;
        op
    }
}

/// What a list of tiles must hold. Tiles may be cut in any way, but each pair (each with an adapter,
/// of a LoRA list) lies in exactly one, all of a tile are of its group, and surplus tiles come last.
struct TileList {
    /// The (expert, slot) of each entry of the permutation; slot −1 in the base list.
    groups: Vec<(i32, i32)>,
    tile_rows: usize,
    /// Tiles of the bucket; those of the memory behind them are not touched.
    tiles: usize,
    lora: bool,
}

impl TileList {
    fn judge(&self, tiles: &HostTensor) -> std::result::Result<(), String> {
        let mut seen = vec![0usize; self.groups.len()];
        let mut surplus = false;
        let poison = i32::from_ne_bytes([POISON[0], POISON[1], POISON[0], POISON[1]]);
        for (i, tile) in tiles.to_ints().chunks(4).enumerate() {
            let [expert, slot, first, rows] = [tile[0], tile[1], tile[2], tile[3]];
            let bad = |what: &str| Err(format!("[{i}] {tile:?} {what}"));
            if i >= self.tiles && tile != [poison; 4] {
                return bad("lies behind the bucket's tiles");
            }
            if i >= self.tiles || rows == 0 {
                surplus = true;
                continue;
            }
            if surplus {
                return bad("lies behind a surplus tile");
            }
            if rows < 0 || rows as usize > self.tile_rows || first < 0 {
                return bad("has no possible extent");
            }
            let pairs = first as usize..(first + rows) as usize;
            let own = |group: &&(i32, i32)| **group == (expert, slot);
            match self.groups.get(pairs.clone()) {
                Some(all) if all.iter().filter(own).count() == all.len() => {}
                other => return bad(&format!("holds the pairs {other:?}")),
            }
            seen[pairs].iter_mut().for_each(|count| *count += 1);
        }
        for (at, (&count, group)) in seen.iter().zip(&self.groups).enumerate() {
            let wanted = usize::from(!self.lora || group.1 >= 0);
            if count != wanted {
                return Err(format!(
                    ": pair {at} of {group:?} lies in {count} tiles, not {wanted}"
                ));
            }
        }
        Ok(())
    }
}

/// All cases.
pub fn cases<B: Backend>(_: &Caps) -> Vec<Case<B>> {
    let new = |tokens, experts, top_k, slots| RouteSpec::new([tokens, experts, top_k, slots]);
    let softmax = |spec| RouteSpec { score: RouteScore::Softmax, ..spec };
    let sigmoid = |spec| RouteSpec { score: RouteScore::Sigmoid, correction: true, ..spec };
    let odd = |spec| RouteSpec { logits: Logits::Odd, ..spec };
    let groups = |groups, keep, best| Some(ExpertGroups { groups, keep, best });
    let specs = [
        new(1, 1, 1, 0),
        new(1, 8, 2, 0),
        new(1, 8, 8, 2),
        new(7, 5, 2, 3),
        RouteSpec { padding: 9, ..new(7, 8, 4, 3) },
        RouteSpec { padding: 9, ..new(0, 8, 4, 3) },
        RouteSpec { padding: 300, ..new(0, 32, 4, 3) },
        RouteSpec { padding: 2, spare: 5, ..new(6, 8, 2, 2) },
        new(33, 32, 4, 4),
        new(70, 128, 8, 6),
        // More experts than are chosen from in registers, and more keys than a sort holds.
        new(70, 256, 8, 2),
        new(70, 257, 8, 2),
        RouteSpec { padding: 4, ..new(9, 1024, 32, 3) },
        new(40, 256, 4, 300),
        RouteSpec { logits: Logits::Ties, ..new(17, 16, 4, 2) },
        RouteSpec { logits: Logits::OneTakesAll, ..new(70, 8, 1, 2) },
        RouteSpec { logits: Logits::OneTakesAll, padding: 3, ..new(67, 16, 3, 1) },
        softmax(new(9, 8, 2, 2)),
        softmax(RouteSpec { renorm: true, ..new(9, 12, 3, 2) }),
        softmax(RouteSpec { scale: 2.5, ..new(9, 6, 2, 0) }),
        softmax(RouteSpec { scale: 16.0, groups: groups(4, 2, 1), ..new(9, 16, 3, 2) }),
        softmax(RouteSpec { logits: Logits::Ties, ..new(9, 16, 3, 2) }),
        sigmoid(new(9, 8, 2, 2)),
        sigmoid(RouteSpec {
            renorm: true,
            scale: 2.5,
            groups: groups(4, 2, 2),
            ..new(13, 16, 4, 3)
        }),
        sigmoid(RouteSpec { renorm: true, correction: false, padding: 1, ..new(13, 16, 4, 3) }),
        odd(RouteSpec { padding: 2, ..new(9, 8, 4, 2) }),
        odd(new(70, 32, 4, 3)),
        odd(new(300, 128, 8, 6)),
        odd(new(33, 300, 8, 2)),
        odd(softmax(new(9, 12, 3, 2))),
        odd(softmax(RouteSpec { groups: groups(4, 2, 2), ..new(19, 16, 3, 2) })),
        odd(sigmoid(new(9, 8, 2, 2))),
        odd(sigmoid(RouteSpec { correction: false, ..new(9, 40, 3, 2) })),
        odd(sigmoid(RouteSpec { groups: groups(4, 2, 2), ..new(13, 16, 4, 3) })),
    ];
    let make =
        |spec: RouteSpec| case(spec.name(), move |rng, caps| HostMoeRoute::random(rng, caps, spec));
    specs.into_iter().map(make).collect()
}
