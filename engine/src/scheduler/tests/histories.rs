//! Random histories: whatever happens in whatever order, each answer is the one its request gets alone,
//! each ends once, and nothing that was held stays held.

use std::collections::VecDeque;

use super::*;

struct Asked {
    prompt: Vec<u32>,
    new: usize,
    n: usize,
    generation: Generation,
    sampling: SamplingParams,
    rows: Asks,
}

#[derive(Clone, Copy, PartialEq)]
enum Asks {
    Nothing,
    Logits,
    Logprobs,
}

/// Arrivals, cancels, several answers, little cache, adapters that come, go and are replaced, steps
/// committed up to two late.
#[test]
fn any_history_gives_each_request_its_answer_and_one_end() {
    let (mut preempted, mut hits) = (0, 0);
    for seed in 0..120 {
        let mut rng = Rng::new(seed);
        let limits = SchedulerLimits {
            max_seqs: 1 + rng.below(5),
            max_batch_tokens: 5 + rng.below(20),
            chunk: 1 + rng.below(20),
            prompt_logit_rows: 1 + rng.below(8),
            prompt_logprob_rows: 1 + rng.below(8),
            // As many as the most that a request asks.
            edits: 32 + rng.below(20),
            max_overtakes: rng.below(3),
        };
        let caching = [PrefixCaching::On, PrefixCaching::Off][rng.below(2)];
        let kv_blocks = 8 + rng.below(8);
        let mut bench = Bench::with(limits, KvBlocks::new(kv_blocks, BLOCK, caching));
        for name in ["a", "b", "c"] {
            bench.ledger.stage(name);
        }
        let mut asked: BTreeMap<RequestId, Asked> = BTreeMap::new();
        let mut cancelled: Vec<RequestId> = Vec::new();
        let mut in_flight: VecDeque<Batch> = VecDeque::new();
        let mut quiet = 0;
        while quiet < 20 {
            if asked.len() < 40 && rng.below(3) == 0 {
                let (id, one) = arrive(&mut bench, &mut rng);
                asked.insert(id, one);
            }
            if rng.below(12) == 0 && !asked.is_empty() {
                let id = RequestId(rng.below(asked.len()) as u64);
                bench.scheduler.cancel(id);
                cancelled.push(id);
            }
            if rng.below(20) == 0 {
                bench.ledger.stage(["a", "b", "c"][rng.below(3)]);
            }
            for over in bench.ledger.sweep(bench.scheduler.last_committed()) {
                bench.scheduler.forget(&over);
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
        assert_eq!(bench.scheduler.kv.used(), 0);
        assert_eq!(bench.scheduler.kv.available(), kv_blocks);
        assert!(bench.ledger.list().iter().all(|line| line.status().requests == 0));
        for (id, asked) in asked {
            judge(&bench, id, &asked, cancelled.contains(&id));
        }
        preempted += bench.scheduler.preemptions;
        hits += bench.scheduler.kv.prefix_report().hit_tokens;
    }
    assert!(preempted > 100 && hits > 1000, "{preempted} preemptions, {hits} hits");
}

fn arrive(bench: &mut Bench, rng: &mut Rng) -> (RequestId, Asked) {
    let (length, new) = (1 + rng.below(20), rng.below(12));
    let mut request = bench.request(length, new);
    // Few beginnings, so that many are alike.
    let alike = rng.below(length + 1);
    request.prompt = (0..length)
        .map(|i| if i < alike { 1 + i as u32 % 3 } else { 1 + rng.below(3) as u32 })
        .collect();
    request.adapter = ["a", "b", "c", ""]
        .get(rng.below(4))
        .filter(|name| !name.is_empty())
        .map(|name| name.to_string());
    let rows = [Asks::Logits, Asks::Logprobs, Asks::Nothing, Asks::Nothing][rng.below(4)];
    match rows {
        Asks::Nothing => {}
        Asks::Logits => request.prompt_logits = Want::Yes,
        Asks::Logprobs => request.prompt_logprobs = Some(0),
    }
    match rng.below(6) {
        0 => request.sampling.repetition_penalty = 1.5,
        1 => request.sampling.frequency_penalty = 0.5,
        _ => {}
    }
    request.n = if rng.below(4) == 0 { 1 + rng.below(4) } else { 1 };
    let pin = request.adapter.as_ref().map(|name| bench.ledger.pin(name).unwrap());
    let asked = Asked {
        prompt: request.prompt.clone(),
        new,
        n: request.n,
        generation: version_of(pin.as_ref()),
        sampling: request.sampling,
        rows,
    };
    (bench.submit(request), asked)
}

/// Plays the adapter store: brings one wanted adapter, evicting another if nobody uses it.
fn bring_wanted(bench: &mut Bench, rng: &mut Rng) {
    if rng.below(3) != 0 {
        return;
    }
    let wanted = bench.scheduler.wanted_adapters();
    let completed = bench.scheduler.last_committed();
    let coming = |key: &&AdapterKey| matches!(bench.ledger.residency(key), Residency::Coming);
    let Some(at) = wanted.iter().position(|key| coming(&key)) else { return };
    if bench.ledger.begin_load(&wanted[at]).is_err() {
        let Some(victim) = bench.ledger.evictable(completed, &wanted[..at]) else {
            return;
        };
        bench.ledger.evict(&victim, completed).unwrap();
        bench.ledger.begin_load(&wanted[at]).unwrap();
    }
    bench.ledger.finish_load(&wanted[at]).unwrap();
}

fn check(bench: &Bench, batch: &Batch, limits: &SchedulerLimits) {
    assert!(batch.tokens() <= limits.max_batch_tokens);
    let (mut logits, mut logprobs, mut edits) = (0, 0, 0);
    for chunk in &batch.chunks {
        match chunk.rows {
            Rows::None => {}
            Rows::Logits => logits += chunk.tokens,
            Rows::Logprobs { rows, .. } => logprobs += rows,
        }
        if chunk.sample {
            edits += bench.scheduler.sequence(chunk.seq).unwrap().task.edits().len();
        }
    }
    assert!(logits <= limits.prompt_logit_rows);
    assert!(logprobs <= limits.prompt_logprob_rows);
    assert!(edits <= limits.edits);
    let mut seqs: Vec<SeqSlot> = batch.chunks.iter().map(|chunk| chunk.seq).collect();
    seqs.sort();
    seqs.dedup();
    assert_eq!(seqs.len(), batch.chunks.len());
    for chunk in &batch.chunks {
        let sequence = bench.scheduler.sequence(chunk.seq).unwrap();
        assert!(sequence.table.blocks().len() * BLOCK >= chunk.first + chunk.tokens);
        assert!(chunk.tokens <= limits.chunk);
    }
}

fn judge(bench: &Bench, id: RequestId, asked: &Asked, cancelled: bool) {
    let events = bench.events(id);
    let ends: Vec<(usize, FinishReason, Usage)> = events
        .iter()
        .filter_map(|event| match event {
            Event::Finished { choice, reason, usage } => Some((*choice, *reason, *usage)),
            _ => None,
        })
        .collect();
    assert_eq!(ends.len(), asked.n, "{id}: {events:?}");
    assert!(matches!(events.last(), Some(Event::Finished { .. })));
    let mut told = 0;
    for choice in 0..asked.n {
        let got = bench.tokens(id, choice);
        told += got.len();
        let seed = choice_seed(id.0, choice);
        let draws = (seed, asked.sampling);
        let expected = penalised(&asked.prompt, asked.generation, draws, asked.new);
        let (_, reason, _) = ends.iter().find(|(one, _, _)| *one == choice).expect("each ends");
        if *reason == FinishReason::Cancelled {
            assert!(cancelled && expected.starts_with(&got));
        } else {
            assert_eq!(got, expected, "{id}, answer {choice}");
            let stopped = expected.last() == Some(&STOP);
            assert_eq!(*reason, if stopped { FinishReason::Stop } else { FinishReason::Length });
        }
    }
    let usage = ends[asked.n - 1].2;
    assert_eq!((usage.prompt, usage.completion), (asked.prompt.len(), told));
    let mut held = start_of(asked.generation);
    let values: Vec<f32> = asked
        .prompt
        .iter()
        .map(|&token| {
            held = mix(held, token);
            value(held)
        })
        .collect();
    let mut rows = Vec::new();
    for event in &events {
        match event {
            Event::PromptLogits { first_position, rows: told, .. } => {
                assert_eq!(*first_position, rows.len());
                rows.extend(told.chunks(VOCAB).map(|row| row[0]));
            }
            Event::PromptLogprobs { first_position, tokens } => {
                assert_eq!(*first_position, rows.len() + 1);
                for told in tokens {
                    assert_eq!(told.token.id, asked.prompt[rows.len() + 1]);
                    rows.push(told.token.logprob);
                }
            }
            _ => {}
        }
    }
    let all = match asked.rows {
        Asks::Nothing => 0,
        Asks::Logits => asked.prompt.len(),
        Asks::Logprobs => asked.prompt.len() - 1,
    };
    assert!(rows.len() == all || cancelled && rows.len() < all);
    assert_eq!(rows, values[..rows.len()]);
}
