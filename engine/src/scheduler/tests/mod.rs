//! The scheduler against a device that is played: any order of arrivals, cancels, forks, adapters coming
//! and going, blocks taken away, and steps committed late must give each request the answer it gets alone,
//! and exactly one end.

mod histories;
mod rooms;
mod rules;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use amphora_hal::{BlockCopy, LogitEdit};

use super::*;
use crate::adapters::ledger::{Ledger, Residency};
use crate::kv::PrefixCaching;
use crate::reply::{Sampled, split};
use crate::request::{
    Delivery, Event, PromptLogprob, Request, SamplingParams, Sink, StopRules, TokenLogprob, Usage,
    Want, choice_seed,
};
use crate::testing::Rng;

const STOP: u32 = 0;
const VOCAB: usize = 3;
const BLOCK: usize = 4;

fn limits() -> SchedulerLimits {
    SchedulerLimits {
        max_seqs: 4,
        max_batch_tokens: 16,
        chunk: 16,
        prompt_logit_rows: 8,
        prompt_logprob_rows: 6,
        edits: 40,
        max_overtakes: 2,
    }
}

/// What a position of the cache holds: its token, and all that decides its keys and values, as a number.
type Held = (u32, u64);

fn mix(before: u64, token: u32) -> u64 {
    Rng::new(before.wrapping_mul(31).wrapping_add(u64::from(token))).next()
}

/// The token drawn after what `held` says; about one in twelve is the stop token.
fn draw(held: u64, seed: u64) -> u32 {
    let draw = Rng::new(held ^ seed.wrapping_mul(0x1234_5677)).below(24);
    if draw < 2 { STOP } else { 1 + draw as u32 % 4 }
}

/// What is told of a row, as a number that f32 holds.
fn value(held: u64) -> f32 {
    (held % 4096) as f32
}

/// The version that a pin is of; not asked of the scheduler, which is under test.
fn version_of(pin: Option<&Pin>) -> Generation {
    Generation(pin.map(|pin| pin.key.version))
}

fn start_of(generation: Generation) -> u64 {
    generation.0.map_or(7, |version| 1000 + version)
}

/// What edits make of a draw: they decide it together with what is held.
fn edited(held: u64, edits: &[LogitEdit]) -> u64 {
    let fold =
        |held, edit: &LogitEdit| mix(held, edit.token * 64 + edit.output_count * 2 + edit.flags);
    edits.iter().fold(held, fold)
}

/// The answer that a model gives alone.
fn solo(prompt: &[u32], generation: Generation, seed: u64, new: usize) -> Vec<u32> {
    penalised(prompt, generation, (seed, SamplingParams::default()), new)
}

fn penalised(
    prompt: &[u32],
    generation: Generation,
    (seed, sampling): (u64, SamplingParams),
    new: usize,
) -> Vec<u32> {
    let mut held = prompt.iter().fold(start_of(generation), |held, &token| mix(held, token));
    let request = Request { sampling, ..Request::new(prompt.to_vec(), Box::new(|_| Delivery::Ok)) };
    let (spec, replies) = split(request, 0);
    replies.into_iter().for_each(Reply::discard);
    let mut history = History::of(&spec);
    let mut answer = Vec::new();
    while answer.len() < new && answer.last() != Some(&STOP) {
        let token = draw(edited(held, &history.edits(&spec)), seed);
        history.push(token);
        held = mix(held, token);
        answer.push(token);
    }
    answer
}

/// Plays a device that runs steps in the order they are planned: cache blocks and a token table.
#[derive(Default)]
struct Played {
    cache: HashMap<(u32, usize), Held>,
    last: HashMap<SeqSlot, u32>,
}

impl Played {
    /// Copies a step's blocks, all at once.
    fn copy(&mut self, batch: &Batch) {
        let copies: Vec<BlockCopy> = batch.chunks.iter().filter_map(|chunk| chunk.copy).collect();
        let before = self.cache.clone();
        for copy in &copies {
            let written = copies.iter().filter(|other| other.to == copy.to).count();
            let read = copies.iter().any(|other| other.from == copy.to);
            assert!(written == 1 && !read, "copies of a step depend on each other");
            for at in 0..BLOCK {
                match before.get(&(copy.from, at)) {
                    Some(&held) => self.cache.insert((copy.to, at), held),
                    None => self.cache.remove(&(copy.to, at)),
                };
            }
        }
    }

    /// Runs a chunk; the number of each position, and the token drawn after the last.
    fn run(&mut self, chunk: &Chunk, sequence: &Sequence) -> (Vec<u64>, u32) {
        let (table, known) = (sequence.table.blocks(), sequence.task.tokens());
        let place = |position: usize| (table[position / BLOCK], position % BLOCK);
        let mut held = start_of(version_of(sequence.task.pin.as_ref()));
        for position in 0..chunk.first {
            let (token, there) = self.cache[&place(position)];
            held = mix(held, token);
            assert_eq!(there, held, "position {position} was computed for another sequence");
            assert!(known.get(position).is_none_or(|&known| known == token));
        }
        let mut numbers = Vec::new();
        for position in chunk.first..chunk.first + chunk.tokens {
            let token = match (chunk.source, known.get(position)) {
                (TokenSource::Known, known) => *known.expect("the host knows it"),
                (TokenSource::LastSampled, _) => self.last[&chunk.seq],
            };
            held = mix(held, token);
            self.cache.insert(place(position), (token, held));
            numbers.push(held);
        }
        if sequence.task.history.matters() && chunk.sample {
            assert_eq!(known.len(), chunk.first + chunk.tokens, "a token is not known yet");
        }
        let drawn = draw(edited(held, &sequence.task.edits()), sequence.task.seed());
        if chunk.sample {
            self.last.insert(chunk.seq, drawn);
        }
        (numbers, drawn)
    }
}

type Log = Arc<Mutex<HashMap<u64, Vec<Event>>>>;

struct Bench {
    scheduler: Scheduler,
    ledger: Ledger,
    device: Played,
    /// By step.
    results: HashMap<Step, StepResults>,
    log: Log,
    next: u64,
}

impl Bench {
    fn new(limits: SchedulerLimits, kv_blocks: usize) -> Self {
        Self::with(limits, KvBlocks::new(kv_blocks, BLOCK, PrefixCaching::Off))
    }

    fn with(limits: SchedulerLimits, kv: KvBlocks) -> Self {
        Bench {
            scheduler: Scheduler::new(limits, kv),
            ledger: Ledger::new(2),
            device: Played::default(),
            results: HashMap::new(),
            log: Log::default(),
            next: 0,
        }
    }

    fn request(&mut self, prompt: usize, new: usize) -> Request {
        let (log, id) = (self.log.clone(), self.next);
        let sink: Sink = Box::new(move |event| {
            log.lock().unwrap().entry(id).or_default().push(event);
            Delivery::Ok
        });
        Request {
            max_new_tokens: new,
            sampling: SamplingParams { seed: Some(id), ..SamplingParams::default() },
            stop: StopRules { eos: vec![STOP], ..StopRules::default() },
            ..Request::new(vec![1; prompt], sink)
        }
    }

    fn submit(&mut self, request: Request) -> RequestId {
        let id = RequestId(self.next);
        self.next += 1;
        let pin = request.adapter.as_deref().map(|name| self.ledger.pin(name).unwrap());
        let (spec, replies) = split(request, 0);
        self.scheduler.submit(id, spec, replies, pin);
        id
    }

    fn ask(&mut self, prompt: usize, new: usize) -> RequestId {
        let request = self.request(prompt, new);
        self.submit(request)
    }

    fn ask_adapter(&mut self, name: &str) -> RequestId {
        let request = Request { adapter: Some(name.into()), ..self.request(2, 2) };
        self.submit(request)
    }

    /// Plans a step and runs it on the played device.
    fn schedule(&mut self) -> Option<Batch> {
        let ledger = &self.ledger;
        let batch = self.scheduler.schedule(&|key| ledger.residency(key))?;
        self.play(&batch);
        Some(batch)
    }

    fn play(&mut self, batch: &Batch) {
        self.device.copy(batch);
        let mut results = StepResults { chunks: Vec::new(), vocab: VOCAB };
        for chunk in &batch.chunks {
            if let Some(slot) = chunk.adapter {
                self.ledger.used(slot, batch.step);
            }
            let sequence = self.scheduler.sequence(chunk.seq).unwrap();
            let (numbers, id) = self.device.run(chunk, sequence);
            let mut brought = Brought::default();
            if chunk.sample {
                brought.token = Some(Sampled { id, logprob: 0.0, top: Vec::new() });
            }
            match chunk.rows {
                Rows::None => {}
                Rows::Logits => {
                    brought.logits = numbers.iter().flat_map(|&n| [value(n); VOCAB]).collect();
                }
                Rows::Logprobs { rows, .. } => {
                    let next = &sequence.task.tokens()[chunk.first + 1..];
                    let told = next[..rows].iter().zip(&numbers).map(|(&id, &n)| PromptLogprob {
                        token: TokenLogprob { id, logprob: value(n) },
                        rank: 1,
                        top: Vec::new(),
                    });
                    brought.logprobs = told.collect();
                }
            }
            results.chunks.push(brought);
        }
        self.results.insert(batch.step, results);
    }

    fn commit(&mut self, batch: &Batch) {
        let results = self.results.remove(&batch.step).unwrap();
        self.scheduler.commit(batch, results);
    }

    fn step(&mut self) -> Option<Batch> {
        let batch = self.schedule()?;
        self.commit(&batch);
        Some(batch)
    }

    fn run(&mut self) {
        while self.step().is_some() {}
        assert!(self.scheduler.is_idle());
    }

    fn events(&self, id: RequestId) -> Vec<Event> {
        self.log.lock().unwrap().get(&id.0).cloned().unwrap_or_default()
    }

    fn tokens(&self, id: RequestId, wanted: usize) -> Vec<u32> {
        let events = self.events(id);
        let tokens = events.iter().filter_map(|event| match event {
            Event::Token { choice, id, .. } if *choice == wanted => Some(*id),
            _ => None,
        });
        tokens.collect()
    }
}

fn shape(batch: &Batch) -> Vec<(usize, usize, usize, bool)> {
    batch.chunks.iter().map(|c| (c.seq.0, c.first, c.tokens, c.sample)).collect()
}
