//! Blocks: who gets them, who loses them, who shares them.

use super::*;

fn cached(blocks: usize) -> KvBlocks {
    KvBlocks::new(blocks, BLOCK, PrefixCaching::On)
}

fn answer(prompt: usize, id: RequestId, new: usize) -> Vec<u32> {
    solo(&vec![1; prompt], Generation(None), id.0, new)
}

/// The seed of a request that goes on for `new` tokens without stopping.
fn lasting(bench: &mut Bench, prompt: usize, new: usize) -> RequestId {
    let base = bench.request(prompt, new);
    let goes_on =
        |&seed: &u64| solo(&base.prompt, Generation(None), seed, new).last() != Some(&STOP);
    let seed = (0..).find(goes_on);
    let sampling = SamplingParams { seed, ..base.sampling };
    bench.submit(Request { sampling, stop: StopRules::default(), ..base })
}

#[test]
fn the_last_to_arrive_loses_its_blocks_and_goes_on_as_if_it_had_not() {
    for late in [false, true] {
        let mut bench = Bench::new(limits(), 6);
        let first = lasting(&mut bench, 7, 14);
        let second = lasting(&mut bench, 7, 14);
        let mut before = None;
        while !bench.scheduler.is_idle() {
            let Some(batch) = bench.schedule() else { break };
            if late && let Some(next) = bench.schedule() {
                bench.commit(&batch);
                bench.commit(&next);
            } else {
                bench.commit(&batch);
            }
            if bench.scheduler.preemptions > 0 && before.is_none() {
                before = Some((bench.tokens(first, 0).len(), bench.tokens(second, 0).len()));
            }
        }
        assert_eq!(bench.scheduler.preemptions, 1);
        let (one, two) = before.expect("it happened on the way");
        assert!(one > 0 && two > 0 && one < 14 && two < 14, "{one} and {two} came before");
        for id in [first, second] {
            let ends = bench.events(id).into_iter().filter(|e| matches!(e, Event::Finished { .. }));
            assert_eq!((bench.tokens(id, 0).len(), ends.count()), (14, 1));
        }
        assert_eq!(bench.scheduler.kv.used(), 0);
    }
}

/// However many wait behind it, the first to arrive computes something in each step, in a cache that
/// holds it and nothing else.
#[test]
fn the_first_to_arrive_always_goes_on() {
    let mut bench = Bench::new(limits(), 6);
    let ids: Vec<RequestId> = (0..12).map(|_| lasting(&mut bench, 7, 17)).collect();
    for id in ids {
        let (mut steps, mut told) = (0, bench.tokens(id, 0).len());
        while told < 17 {
            bench.step().expect("something is to be done");
            let now = bench.tokens(id, 0).len();
            steps += 1;
            assert!(now > told || steps <= 3, "{id} stands at {now} tokens");
            told = now;
        }
    }
    assert!(bench.scheduler.preemptions > 0);
    bench.run();
}

#[test]
fn a_request_that_begins_like_another_computes_the_rest() {
    let mut bench = Bench::with(limits(), cached(16));
    bench.ask(13, 1);
    bench.run();
    bench.ask(13, 1);
    assert_eq!(shape(&bench.schedule().unwrap()), [(0, 12, 1, true)]);
    let report = bench.scheduler.kv.prefix_report();
    assert_eq!((report.queried_tokens, report.hit_tokens), (26, 12));
}

#[test]
fn cached_tokens_are_told() {
    let mut bench = Bench::with(limits(), cached(16));
    for expected in [0, 12] {
        let id = bench.ask(13, 3);
        bench.run();
        let Some(Event::Finished { usage, .. }) = bench.events(id).last().cloned() else {
            panic!("no end");
        };
        assert_eq!((usage.prompt, usage.cached), (13, expected));
        assert_eq!(bench.tokens(id, 0), answer(13, id, 3));
    }
}

#[test]
fn positions_whose_logits_are_asked_for_are_computed() {
    let mut bench = Bench::with(limits(), cached(16));
    bench.ask(13, 1);
    bench.run();
    let request = Request { prompt_logits: Want::Yes, ..bench.request(13, 1) };
    let id = bench.submit(request);
    bench.run();
    let rows = bench.events(id).into_iter().map(|event| match event {
        Event::PromptLogits { rows, .. } => rows.len() / VOCAB,
        Event::PromptLogprobs { tokens, .. } => tokens.len(),
        _ => 0,
    });
    assert_eq!(rows.sum::<usize>(), 13);
    let request = Request { prompt_logprobs: Some(2), ..bench.request(13, 1) };
    let id = bench.submit(request);
    bench.run();
    let told = bench.events(id).into_iter().map(|event| match event {
        Event::PromptLogprobs { tokens, .. } => tokens.len(),
        _ => 0,
    });
    assert_eq!(told.sum::<usize>(), 12, "the first token has none");
}

#[test]
fn penalties_wait_for_the_token_before_and_bias_does_not() {
    let mut bench = Bench::new(limits(), 16);
    let biased = Request { logit_bias: vec![(1, 2.0)], ..bench.request(3, 9) };
    bench.submit(biased);
    let sampling = SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() };
    let penalised = Request { sampling, ..bench.request(3, 9) };
    bench.submit(penalised);
    let first = bench.schedule().unwrap();
    assert_eq!(first.chunks.len(), 2);
    let second = bench.schedule().unwrap();
    assert_eq!(shape(&second), [(0, 3, 1, true)]);
    bench.commit(&first);
    assert_eq!(bench.schedule().unwrap().chunks.len(), 2);
}

#[test]
fn answers_to_one_prompt_share_its_full_blocks() {
    let mut bench = Bench::new(limits(), 16);
    let request = Request { n: 4, stop: StopRules::default(), ..bench.request(11, 5) };
    let id = bench.submit(request);
    assert_eq!(shape(&bench.step().unwrap()), [(0, 0, 11, true)]);
    let second = bench.schedule().unwrap();
    assert_eq!(second.chunks.len(), 4);
    // Two full blocks of the prompt for all, and a copy of the third for each.
    assert_eq!(bench.scheduler.kv.used(), 2 + 4);
    bench.commit(&second);
    bench.run();
    for choice in 0..4 {
        let tokens = bench.tokens(id, choice);
        let mut held = start_of(Generation(None));
        (0..11).for_each(|_| held = mix(held, 1));
        for token in &tokens {
            assert_eq!(*token, draw(held, choice_seed(id.0, choice)));
            held = mix(held, *token);
        }
        assert_eq!(tokens.len(), 5);
    }
    assert_eq!(bench.scheduler.kv.used(), 0);
}

/// Answers that wait hold shared blocks; when nothing else runs these must not be in their own way.
#[test]
fn shares_that_wait_give_way() {
    let limits = SchedulerLimits { max_seqs: 1, ..limits() };
    let mut bench = Bench::new(limits, 3);
    let request = Request { n: 3, stop: StopRules::default(), ..bench.request(9, 3) };
    let id = bench.submit(request);
    let other = bench.ask(8, 3);
    bench.run();
    for choice in 0..3 {
        assert_eq!(bench.tokens(id, choice).len(), 3);
    }
    assert_eq!(bench.tokens(other, 0), answer(8, other, 3));
}

#[test]
fn a_cancelled_request_ends_all_its_answers() {
    for steps in 0..4 {
        let mut bench = Bench::new(SchedulerLimits { max_seqs: 2, ..limits() }, 16);
        bench.ledger.stage("x");
        let key = bench.ledger.pin("x").unwrap().key;
        bench.ledger.begin_load(&key).unwrap();
        bench.ledger.finish_load(&key).unwrap();
        let request = Request {
            n: 5,
            adapter: Some("x".into()),
            stop: StopRules::default(),
            ..bench.request(6, 8)
        };
        let id = bench.submit(request);
        (0..steps).for_each(|_| drop(bench.step()));
        bench.scheduler.cancel(id);
        let ends = bench.events(id).into_iter().filter(|e| matches!(e, Event::Finished { .. }));
        assert_eq!(ends.count(), 5);
        assert!(bench.scheduler.is_idle());
        bench.ledger.retire("x").unwrap();
        assert_eq!(bench.ledger.sweep(bench.scheduler.last_committed()), [key]);
    }
}

#[test]
fn what_a_prompt_had_computed_before_it_lost_its_blocks_is_not_told_as_cached() {
    let mut bench = Bench::with(SchedulerLimits { chunk: 1, ..limits() }, cached(6));
    lasting(&mut bench, 4, 16);
    for _ in 0..4 {
        bench.step();
    }
    let request = Request { prompt: vec![2; 12], ..bench.request(12, 1) };
    let second = bench.submit(request);
    bench.run();
    assert_eq!(bench.scheduler.preemptions, 1);
    assert!(bench.scheduler.kv.prefix_report().hit_tokens > 0, "it found its own blocks again");
    let events = bench.events(second);
    let Some(Event::Finished { usage, .. }) = events.last() else { panic!("{events:?}") };
    assert_eq!((usage.prompt, usage.cached), (12, 0));
}
