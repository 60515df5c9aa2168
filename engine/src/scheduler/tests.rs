//! The scheduler against a device that is played: any order of arrivals, cancels, adapters coming and
//! going, and steps committed late must give each request its own answer and exactly one end.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use super::*;
use crate::adapters::ledger::Ledger;
use crate::request::{Request, Sink, StopRules, Want};
use crate::testing::Rng;

const STOP: u32 = 0;
const VOCAB: usize = 3;

fn limits() -> SchedulerLimits {
    SchedulerLimits {
        max_seqs: 4,
        max_batch_tokens: 16,
        chunk: 16,
        prompt_logit_rows: 8,
        max_overtakes: 2,
    }
}

type Log = Arc<Mutex<HashMap<u64, Vec<Event>>>>;

struct Bench {
    scheduler: Scheduler,
    ledger: Ledger,
    log: Log,
    next: u64,
}

impl Bench {
    fn new(limits: SchedulerLimits, kv_blocks: usize) -> Self {
        Bench {
            scheduler: Scheduler::new(limits, KvBlocks::new(kv_blocks, 4)),
            ledger: Ledger::new(2),
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
            stop: StopRules { eos: vec![STOP], ..StopRules::default() },
            ..Request::new(vec![1; prompt], sink)
        }
    }

    fn submit(&mut self, request: Request) -> RequestId {
        let id = RequestId(self.next);
        self.next += 1;
        let pin = request.adapter.as_deref().map(|name| self.ledger.pin(name).unwrap());
        let (spec, reply) = Reply::split(request, 0);
        self.scheduler.submit(id, spec, reply, pin);
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

    fn schedule(&mut self) -> Option<Batch> {
        let ledger = &self.ledger;
        let batch = self.scheduler.schedule(&|key| ledger.residency(key))?;
        for slot in batch.chunks.iter().filter_map(|chunk| chunk.adapter) {
            self.ledger.used(slot, batch.step);
        }
        Some(batch)
    }

    /// Commits with tokens that are a function of request and position, as a real model's are.
    fn commit(&mut self, batch: &Batch) {
        let mut sampled = Vec::new();
        let mut prompt_logits = Vec::new();
        for chunk in &batch.chunks {
            let id = self.scheduler.sequence(chunk.seq).unwrap().id;
            if chunk.sample {
                let id = token(id.0, chunk.first + chunk.tokens);
                sampled.push(Sampled { id, logprob: 0.0 });
            }
            for position in chunk.first..chunk.first + if chunk.logits { chunk.tokens } else { 0 } {
                prompt_logits.extend([position as f32; VOCAB]);
            }
        }
        let results =
            StepResults { sampled: &sampled, prompt_logits: &prompt_logits, vocab: VOCAB };
        self.scheduler.commit(batch, results);
    }

    fn step(&mut self) -> Option<Batch> {
        let batch = self.schedule()?;
        self.commit(&batch);
        Some(batch)
    }

    fn events(&self, id: RequestId) -> Vec<Event> {
        self.log.lock().unwrap().get(&id.0).cloned().unwrap_or_default()
    }
}

/// The token at `position` of a request; about one in twelve is the stop token.
fn token(id: u64, position: usize) -> u32 {
    let draw = Rng::new(id * 1000 + position as u64).below(12);
    if draw == 0 { STOP } else { draw as u32 }
}

fn shape(batch: &Batch) -> Vec<(usize, usize, usize, bool)> {
    batch.chunks.iter().map(|c| (c.seq.0, c.first, c.tokens, c.sample)).collect()
}

#[test]
fn a_long_prompt_shares_the_budget_with_decodes_which_come_first() {
    let mut bench = Bench::new(limits(), 64);
    bench.ask(3, 9);
    assert_eq!(shape(&bench.schedule().unwrap()), [(0, 0, 3, true)]);
    bench.ask(20, 2);
    bench.ask(5, 2);
    let second = bench.schedule().unwrap();
    assert_eq!(shape(&second), [(0, 3, 1, true), (1, 0, 15, false)]);
    let third = bench.schedule().unwrap();
    assert_eq!(shape(&third), [(0, 4, 1, true), (1, 15, 5, true), (2, 0, 5, true)]);
    assert_eq!(third.chunks[0].source, TokenSource::LastSampled);
}

#[test]
fn chunks_cut_prompts_and_cover_every_position_once() {
    for chunk in [1, 3, 16] {
        let mut bench = Bench::new(SchedulerLimits { chunk, ..limits() }, 64);
        bench.ask(10, 1);
        let mut at = 0;
        while let Some(batch) = bench.step() {
            assert_eq!(batch.chunks[0].first, at);
            assert!(batch.chunks[0].tokens <= chunk);
            at += batch.chunks[0].tokens;
            assert_eq!(batch.chunks[0].sample, at == 10);
        }
        assert_eq!(at, 10);
    }
}

#[test]
fn a_slot_is_not_reused_while_a_step_that_uses_it_is_in_flight() {
    let mut bench = Bench::new(SchedulerLimits { max_seqs: 1, ..limits() }, 64);
    let id = bench.ask(2, 8);
    let first = bench.schedule().unwrap();
    let second = bench.schedule().unwrap();
    bench.ask(2, 8);
    bench.scheduler.cancel(id);
    assert_eq!(bench.events(id).len(), 1, "the client is told at once");
    assert_eq!(bench.schedule(), None);
    bench.commit(&first);
    assert_eq!(bench.schedule(), None);
    bench.commit(&second);
    assert!(bench.schedule().is_some());
    assert_eq!(bench.events(id).len(), 1);
}

#[test]
fn prompt_logits_come_for_each_position_within_the_rows_of_a_step() {
    let mut bench = Bench::new(limits(), 64);
    let request = Request { prompt_logits: Want::Yes, ..bench.request(19, 0) };
    let id = bench.submit(request);
    while let Some(batch) = bench.step() {
        assert!(batch.tokens() <= limits().prompt_logit_rows && batch.sampled() == 0);
    }
    let mut at = 0;
    for event in bench.events(id) {
        match event {
            Event::PromptLogits { first_position, vocab, rows } => {
                assert_eq!((first_position, vocab), (at, VOCAB));
                rows.chunks(vocab)
                    .enumerate()
                    .for_each(|(i, row)| assert_eq!(row[0], (at + i) as f32));
                at += rows.len() / vocab;
            }
            Event::Finished { reason, .. } => assert_eq!(reason, FinishReason::Length),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(at, 19);
}

#[test]
fn a_client_that_is_gone_frees_its_sequence() {
    let mut bench = Bench::new(limits(), 64);
    let request = Request { sink: Box::new(|_| Delivery::Gone), ..bench.request(2, 8) };
    bench.submit(request);
    bench.step();
    assert!(bench.scheduler.is_idle());
    assert_eq!(bench.scheduler.finished.cancelled, 1);
}

#[test]
fn a_request_waits_for_its_adapter_while_others_run() {
    let mut bench = Bench::new(limits(), 64);
    let key = bench.ledger.stage("x");
    let waiting = bench.ask_adapter("x");
    let base = bench.ask(2, 1);
    bench.step();
    assert!(bench.events(waiting).is_empty() && !bench.events(base).is_empty());
    assert_eq!(bench.scheduler.wanted_adapters(), std::slice::from_ref(&key));
    bench.ledger.begin_load(&key).unwrap();
    assert_eq!(bench.step(), None);
    let slot = bench.ledger.finish_load(&key).unwrap();
    assert_eq!(bench.step().unwrap().chunks[0].adapter, Some(slot));
}

/// One slot that a busy adapter keeps: the other one starts after a bounded number of answers.
#[test]
fn a_busy_adapter_cannot_keep_its_slot_for_ever() {
    let mut bench = Bench::new(SchedulerLimits { max_seqs: 2, ..limits() }, 64);
    bench.ledger = Ledger::new(1);
    let a = bench.ledger.stage("a");
    bench.ledger.begin_load(&a).unwrap();
    bench.ledger.finish_load(&a).unwrap();
    let b = bench.ledger.stage("b");
    bench.ask_adapter("a");
    bench.ask_adapter("a");
    let late = bench.ask_adapter("b");
    let before = |bench: &Bench| bench.scheduler.finished.length + bench.scheduler.finished.stop;
    for _ in 0..100 {
        bench.ask_adapter("a");
        bench.step();
        let completed = bench.scheduler.last_committed();
        if bench.ledger.evict(&a, completed).is_ok() {
            bench.ledger.begin_load(&b).unwrap();
            bench.ledger.finish_load(&b).unwrap();
        }
        if !bench.events(late).is_empty() {
            // Those that ran, those that passed, and those in slots when the passing stopped.
            assert!(before(&bench) <= 2 + 2 + 2, "{} answers came before", before(&bench));
            return;
        }
    }
    panic!("the request never ran");
}

#[test]
fn one_step_too_lets_no_more_pass_than_allowed() {
    let mut bench = Bench::new(SchedulerLimits { max_seqs: 8, ..limits() }, 64);
    bench.ledger.stage("cold");
    let hot = bench.ledger.stage("hot");
    bench.ledger.begin_load(&hot).unwrap();
    bench.ledger.finish_load(&hot).unwrap();
    bench.ask_adapter("cold");
    for _ in 0..5 {
        bench.ask_adapter("hot");
    }
    assert_eq!(bench.schedule().unwrap().chunks.len(), limits().max_overtakes);
}

#[test]
fn an_adapter_that_cannot_be_had_fails_its_requests_alone() {
    let mut bench = Bench::new(limits(), 64);
    bench.ledger.stage("gone");
    let refused = bench.ask_adapter("gone");
    let base = bench.ask(2, 1);
    let batch = bench.scheduler.schedule(&|_| Residency::Absent).unwrap();
    bench.commit(&batch);
    assert!(matches!(bench.events(refused)[..], [Event::Failed { .. }]));
    assert!(matches!(bench.events(base).last(), Some(Event::Finished { .. })));
}

#[test]
fn when_the_device_fails_every_client_is_told() {
    let mut bench = Bench::new(limits(), 16);
    let ids: Vec<RequestId> = (0..8).map(|_| bench.ask(5, 5)).collect();
    bench.schedule();
    bench.schedule();
    bench.scheduler.fail_all(&Failure::Device("gone".into()));
    for id in ids {
        let failed = Event::Failed { error: Failure::Device("gone".into()) };
        assert_eq!(bench.events(id), [failed]);
    }
    assert!(bench.scheduler.is_idle());
    assert_eq!((bench.scheduler.kv.used(), bench.scheduler.kv.promised()), (0, 0));
}

/// Arrivals, cancels, little cache, adapters that come and go, steps committed up to two late.
#[test]
fn any_history_gives_each_request_its_answer_and_one_end() {
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let limits = SchedulerLimits {
            max_seqs: 1 + rng.below(5),
            max_batch_tokens: 5 + rng.below(20),
            chunk: 1 + rng.below(20),
            prompt_logit_rows: 1 + rng.below(8),
            max_overtakes: rng.below(3),
        };
        let kv_blocks = 8 + rng.below(12);
        let mut bench = Bench::new(limits, kv_blocks);
        ["a", "b", "c"].iter().for_each(|name| drop(bench.ledger.stage(name)));
        let mut asked: BTreeMap<RequestId, (usize, usize)> = BTreeMap::new();
        let mut cancelled: Vec<RequestId> = Vec::new();
        let mut in_flight: VecDeque<Batch> = VecDeque::new();
        let mut quiet = 0;
        while quiet < 20 {
            if asked.len() < 40 && rng.below(3) == 0 {
                let (prompt, new) = (1 + rng.below(20), rng.below(12));
                let mut request = bench.request(prompt, new);
                request.adapter = ["a", "b", "c", ""]
                    .get(rng.below(4))
                    .filter(|name| !name.is_empty())
                    .map(|name| name.to_string());
                if rng.below(4) == 0 {
                    request.prompt_logits = Want::Yes;
                }
                asked.insert(bench.submit(request), (prompt, new));
            }
            if rng.below(12) == 0 && !asked.is_empty() {
                let id = RequestId(rng.below(asked.len()) as u64);
                bench.scheduler.cancel(id);
                cancelled.push(id);
            }
            bring_wanted(&mut bench, &mut rng);
            let planned = bench.schedule();
            quiet = if planned.is_some() || !in_flight.is_empty() { 0 } else { quiet + 1 };
            if let Some(batch) = planned {
                check(&bench, &batch, &limits);
                in_flight.push_back(batch);
            }
            while in_flight.len() > rng.below(3) {
                let batch = in_flight.pop_front().unwrap();
                bench.commit(&batch);
            }
        }
        assert!(bench.scheduler.is_idle(), "seed {seed}: requests are stuck");
        assert_eq!((bench.scheduler.kv.used(), bench.scheduler.kv.promised()), (0, 0));
        assert!(bench.ledger.list().iter().all(|status| status.requests == 0));
        for (id, (prompt, new)) in asked {
            judge(&bench.events(id), id, (prompt, new), cancelled.contains(&id));
        }
    }
}

/// Plays the adapter store: brings one wanted adapter, evicting another if nobody uses it.
fn bring_wanted(bench: &mut Bench, rng: &mut Rng) {
    if rng.below(3) != 0 {
        return;
    }
    let wanted = bench.scheduler.wanted_adapters();
    let completed = bench.scheduler.last_committed();
    let Some(first) = wanted.first() else { return };
    if !matches!(bench.ledger.residency(first), Residency::Coming) {
        return;
    }
    if bench.ledger.begin_load(first).is_err() {
        let Some(victim) = bench.ledger.evictable(completed, &wanted[..1]) else {
            return;
        };
        bench.ledger.evict(&victim, completed).unwrap();
        bench.ledger.begin_load(first).unwrap();
    }
    bench.ledger.finish_load(first).unwrap();
}

fn check(bench: &Bench, batch: &Batch, limits: &SchedulerLimits) {
    assert!(batch.tokens() <= limits.max_batch_tokens);
    let logit_rows: usize = batch.chunks.iter().filter(|c| c.logits).map(|c| c.tokens).sum();
    assert!(logit_rows <= limits.prompt_logit_rows);
    let mut seqs: Vec<SeqSlot> = batch.chunks.iter().map(|chunk| chunk.seq).collect();
    seqs.sort();
    seqs.dedup();
    assert_eq!(seqs.len(), batch.chunks.len());
    for chunk in &batch.chunks {
        let sequence = bench.scheduler.sequence(chunk.seq).unwrap();
        assert!(sequence.table.blocks().len() * 4 >= chunk.first + chunk.tokens);
        assert!(chunk.tokens <= limits.chunk);
    }
}

fn judge(events: &[Event], id: RequestId, (prompt, new): (usize, usize), cancelled: bool) {
    let ends = |event: &&Event| matches!(event, Event::Finished { .. } | Event::Failed { .. });
    assert_eq!(events.iter().filter(ends).count(), 1, "{id}: {events:?}");
    let got: Vec<u32> = events
        .iter()
        .filter_map(|event| match event {
            Event::Token { id, .. } => Some(*id),
            _ => None,
        })
        .collect();
    let mut expected: Vec<u32> = (0..new).map(|i| token(id.0, prompt + i)).collect();
    if let Some(stop) = expected.iter().position(|&token| token == STOP) {
        expected.truncate(stop + 1);
    }
    let Some(Event::Finished { reason, usage, .. }) = events.last() else {
        panic!("{id}: {events:?}");
    };
    assert_eq!((usage.prompt, usage.completion), (prompt, got.len()));
    if *reason == FinishReason::Cancelled {
        assert!(cancelled && expected.starts_with(&got));
    } else {
        assert_eq!(got, expected, "{id}");
        let stopped = expected.last() == Some(&STOP);
        assert_eq!(*reason, if stopped { FinishReason::Stop } else { FinishReason::Length });
    }
}
