//! The rules of a step, one by one.

use super::*;

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
    let (mut at, mut held) = (0, start_of(Generation(None)));
    for event in bench.events(id) {
        match event {
            Event::PromptLogits { first_position, vocab, rows } => {
                assert_eq!((first_position, vocab), (at, VOCAB));
                for row in rows.chunks(vocab) {
                    held = mix(held, 1);
                    assert_eq!(row[0], value(held));
                }
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
    bench.play(&batch);
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
    assert_eq!(bench.scheduler.kv.used(), 0);
}

/// Later answers that take their edits first must not keep an earlier request from its first token.
#[test]
fn edits_go_by_arrival() {
    let mut bench = Bench::new(SchedulerLimits { chunk: 2, edits: 6, ..limits() }, 64);
    let bias = |count: u32| (0..count).map(|token| (token, 0.5)).collect::<Vec<_>>();
    let biased = |bench: &mut Bench, prompt, count| {
        let base = bench.request(prompt, 3);
        bench.submit(Request { logit_bias: bias(count), stop: StopRules::default(), ..base })
    };
    let old = biased(&mut bench, 12, 4);
    bench.step();
    for step in 0..12 {
        biased(&mut bench, 1, 3);
        bench.step();
        if !bench.tokens(old, 0).is_empty() {
            return;
        }
        assert!(step < 11, "it is still kept from its first token");
    }
}

/// Five tokens, as many as a step may touch, are biased and penalised at once.
#[test]
fn a_token_that_bias_and_penalties_touch_takes_one_edit() {
    let mut bench = Bench::new(SchedulerLimits { edits: 5, ..limits() }, 64);
    let mut request = bench.request(3, 6);
    request.logit_bias = (0..5).map(|token| (token, 1.0)).collect();
    request.sampling.repetition_penalty = 1.5;
    let id = bench.submit(request);
    bench.run();
    assert!(matches!(bench.events(id).last(), Some(Event::Finished { .. })));
}
