//! Wiring and shutdown: from a configuration to running actors, and back to nothing.

use std::sync::atomic::AtomicU64;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use actix::{Actor, Addr, Arbiter};
use anyhow::Context;
use keepsake_config::{CalibrateMode, Config, ConfigError, RocksOptions};
use keepsake_kernels::{Device, DeviceKind, KvLayout, KvPool};
use keepsake_model::chat::ChatTemplate;
use keepsake_model::{Model, ModelSource};
use keepsake_tiers::eviction::POLICIES;
use keepsake_tiers::{
    BlockPool, DeviceTier, KeyScope, MoverConfig, MoverPool, Registry, Tier, TierContext, TurnStore, TurnStoreConfig,
};

use tempfile::TempDir;

use crate::actors::eviction::EvictionActor;
use crate::actors::gpu_worker::{self, GpuWorkerActor};
use crate::actors::scheduler::{Connect, SchedulerActor, Wiring};
use crate::actors::session::{LiveTurns, SessionParts};
use crate::actors::store::{self, StoreActor, StoreParts};
use crate::actors::tier::{self, TierActor, TierParts};
use crate::calibrate::{self, Origin, Subject};
use crate::core::{CoreConfig, Costs, PolicyChoice, QueueOrder, Scheduler, TierIndex, TierSpec};
use crate::gateway::{Gateway, ModelCard, Observed};
use crate::http;
use crate::messages::scheduler::Drain;
use crate::telemetry::metrics::Metrics;

/// Commands that may be under way at a tier beside a sequence's loads.
const MOVES_IN_FLIGHT: usize = 64;
/// How long a client is asked to wait when the queue is full.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Time for connections to close after the last turn, and for threads to end after the deadline.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// The exit code of a process whose core, worker, tier or session thread panicked.
const PANIC_EXIT_CODE: i32 = 70;

/// Serves until SIGTERM or SIGINT.
pub fn serve(config: Config) -> anyhow::Result<()> {
    exit_on_panic();
    actix::System::new().block_on(async move {
        let engine = Engine::start(&config)?;
        let bind = config.server.bind;
        let (server, addresses) = http::bind(&config, engine.gateway.clone())
            .with_context(|| format!("server.bind = {bind}: cannot listen"))?;
        for address in addresses {
            tracing::info!(%address, model = engine.gateway.model().name, "serving");
        }
        let handle = server.handle();
        let server = actix::spawn(server);
        wait_for_signal().await?;
        let deadline = Instant::now() + config.server.shutdown_deadline;
        // The last quarter is for saving chunks and closing the tiers.
        let turns_deadline = Instant::now() + config.server.shutdown_deadline * 3 / 4;
        tracing::info!(turns = engine.gateway.num_turns(), "shutting down");
        engine.gateway.drain();
        engine.finish_turns(turns_deadline).await;
        let answers = turns_deadline.saturating_duration_since(Instant::now()) + CLOSE_GRACE;
        if actix::clock::timeout(answers, handle.stop(true)).await.is_err() {
            handle.stop(false).await;
        }
        server.await??;
        engine.stop(deadline).await;
        tracing::info!("stopped");
        Ok(())
    })
}

/// Everything behind HTTP.
pub struct Engine {
    pub gateway: Gateway,
    scheduler: Addr<SchedulerActor>,
    arbiters: Vec<Arbiter>,
    tiers: Vec<Arc<dyn Tier>>,
    mover: Arc<MoverPool>,
    store: Arc<TurnStore>,
    /// Removed with the engine.
    _turns_folder: Option<TempDir>,
}

impl Engine {
    /// Loads the model, opens the tiers and starts the actors; within a running actix system.
    pub fn start(config: &Config) -> anyhow::Result<Self> {
        let (device, model) = open_model(config)?;
        tracing::info!(
            model = model.name(),
            weight_bytes = model.weight_bytes(),
            device = device.describe(),
            "model loaded"
        );
        if !model.chat.can_append() {
            tracing::warn!(
                "the chat template changes what it rendered before: every turn renders its conversation anew"
            );
        }
        Self::start_with(config, model, device)
    }

    /// The same with a model that is there already.
    pub fn start_with(config: &Config, model: Arc<Model>, device: Device) -> anyhow::Result<Self> {
        check_names(config)?;
        let layout = model.kv_layout(config.scheduler.chunk_tokens);
        let chunk_bytes = layout.chunk_bytes();
        config.check_device_pool(chunk_bytes as u64)?;
        let num_blocks = (config.tiers[0].capacity.as_u64() / chunk_bytes as u64) as usize;
        let pool = Arc::new(KvPool::new(&device, layout, num_blocks)?);
        let blocks = Arc::new(BlockPool::new(num_blocks));
        let scope = key_scope(&model, &device, layout);
        let (store, turns_folder) = open_turn_store(config)?;
        let store = Arc::new(store);
        let device_tier = Arc::new(DeviceTier::new(config.tiers[0].name(), Arc::clone(&pool), Arc::clone(&blocks))?);
        let tiers = open_tiers(config, &scope, (&pool, &blocks))?;
        let max_moves = num_blocks + 2 * MOVES_IN_FLIGHT;
        let mover_config = MoverConfig { queue_moves: max_moves, ..MoverConfig::default() };
        let mover = Arc::new(MoverPool::new(layout, mover_config)?);
        let metrics = Arc::new(Metrics::new());

        let costs = costs(config, &subject(config, &model, &device, &scope));
        let core_config = core_config(config, max_context(config, &model), costs);
        let mut core = Scheduler::new(core_config, blocks, tier_specs(config, &tiers, chunk_bytes));
        remove_doomed(&store, &tiers)?;
        recover(&mut core, &tiers)?;
        let limit = core.limit();

        let arbiters: Vec<Arbiter> = (0..3).map(|_| Arbiter::new()).collect();
        let [core_arbiter, tier_arbiter, session_arbiter] = &arbiters[..] else { unreachable!("three were made") };
        let scheduler = {
            let metrics = Arc::clone(&metrics);
            SchedulerActor::start_in_arbiter(&core_arbiter.handle(), move |_| SchedulerActor::new(core, metrics))
        };
        let worker = GpuWorkerActor::start_thread(
            Arc::clone(&model),
            device,
            pool,
            config.scheduler.step_tokens,
            config.scheduler.steps_in_flight,
            scheduler.clone().recipient(),
        )?;
        let worker = GpuWorkerActor::start_in_arbiter(&core_arbiter.handle(), move |_| worker);
        let eviction = {
            let scheduler = scheduler.clone().recipient();
            EvictionActor::start_in_arbiter(&tier_arbiter.handle(), move |_| EvictionActor::new(scheduler))
        };
        let parts = TierParts {
            device: device_tier,
            tiers: tiers.clone(),
            mover: Arc::clone(&mover),
            layout,
            layout_id: scope.layout_id(),
            load_timeout: config.scheduler.load_timeout,
            ended: scheduler.clone().recipient(),
            reported: scheduler.clone().recipient(),
            metrics: Arc::clone(&metrics),
        };
        let tier_actors: Vec<Addr<TierActor>> = (0..tiers.len())
            .map(|index| {
                let actor = TierActor::start_thread(TierIndex(index), parts.clone(), max_moves);
                TierActor::start_in_arbiter(&tier_arbiter.handle(), move |_| actor)
            })
            .collect();
        scheduler.do_send(Connect(Wiring {
            worker: worker.clone().recipient(),
            tiers: tier_actors.iter().map(|tier| tier.clone().recipient()).collect(),
            eviction: eviction.clone().recipient(),
        }));

        let num_permits = config.server.max_queued + config.scheduler.max_running;
        let live = Arc::new(LiveTurns::new());
        let store_actor = {
            let durable = tiers.iter().filter(|t| t.capability().durable).cloned().collect();
            let parts = StoreParts {
                store: Arc::clone(&store),
                durable,
                live: Arc::clone(&live),
                scheduler: scheduler.clone().recipient(),
                secret: store.secret(),
                fingerprint: scope.fingerprint(),
                chunk_tokens: layout.chunk_tokens,
                metrics: Arc::clone(&metrics),
            };
            let actor = StoreActor::start_threads(parts, num_permits);
            StoreActor::start_in_arbiter(&tier_arbiter.handle(), move |_| actor)
        };
        let card = ModelCard {
            name: config.model.name.clone().unwrap_or_else(|| model.name().to_owned()),
            created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            max_context: limit,
            vocab_size: model.hparams.vocab_size,
        };
        let session_parts = Arc::new(SessionParts {
            model,
            scheduler: scheduler.clone(),
            store: store_actor,
            turn_store: Arc::clone(&store),
            live,
            num_sessions: AtomicU64::new(0),
            next_sequence: AtomicU64::new(0),
            metrics,
            secret: store.secret(),
            weights: config.tenants.iter().map(|tenant| (tenant.name.clone(), tenant.weight)).collect(),
            fingerprint: scope.fingerprint(),
            tier_names: tiers.iter().map(|t| t.name().to_owned()).collect(),
            idle_after: config.sessions.idle_after,
            queue_retry_after: RETRY_AFTER,
        });
        let observed = Observed { worker, eviction, tiers: tier_actors };
        let gateway = Gateway::new(session_parts, card, vec![session_arbiter.handle()], num_permits, observed);
        Ok(Self { gateway, scheduler, arbiters, tiers, mover, store, _turns_folder: turns_folder })
    }

    /// Waits for running turns until the deadline.
    pub async fn finish_turns(&self, deadline: Instant) {
        while self.gateway.num_turns() > 0 && Instant::now() < deadline {
            actix::clock::sleep(Duration::from_millis(20)).await;
        }
        if self.gateway.num_turns() > 0 {
            tracing::warn!(turns = self.gateway.num_turns(), "turns are cut off by the shutdown deadline");
            self.gateway.cut_turns();
        }
    }

    /// Ends moves, flushes the tiers and the turn store, and stops the actors.
    pub async fn stop(self, deadline: Instant) {
        let drain = self.scheduler.send(Drain);
        // Past the deadline the rest is abandoned: K/V can be recomputed, and every acknowledged turn is on disk.
        let _ = actix::clock::timeout(deadline.saturating_duration_since(Instant::now()), drain).await;
        for arbiter in &self.arbiters {
            arbiter.stop();
        }
        let closing = actix_web::web::block(move || {
            self.mover.close(deadline);
            for tier in &self.tiers {
                if let Err(error) = tier.close(deadline) {
                    tracing::warn!(tier = tier.name(), %error, "tier did not close cleanly");
                }
            }
            if let Err(error) = self.store.close(deadline) {
                tracing::error!(%error, "the turn store did not close cleanly");
            }
            for arbiter in self.arbiters {
                // A panic there has ended the process already.
                let _ = arbiter.join();
            }
        });
        let rest = deadline.saturating_duration_since(Instant::now()) + CLOSE_GRACE;
        match actix::clock::timeout(rest, closing).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => tracing::error!("closing the tiers failed"),
            // Every acknowledged turn is on disk, and K/V can be recomputed.
            Err(_) => tracing::warn!("a tier did not close in time"),
        }
    }
}

/// Checks the names that the configuration's own crate cannot know: this binary's backends and eviction policies.
pub fn check_names(config: &Config) -> Result<(), ConfigError> {
    if config.device.kind == keepsake_config::DeviceKind::Cuda {
        let reason = "the server does not run on CUDA yet; use \"cpu\" or \"auto\"";
        return Err(ConfigError::invalid("device.kind", "\"cuda\"", reason));
    }
    let registry = Registry::default();
    let kinds: Vec<&str> = registry.kinds().collect();
    for (index, tier) in config.tiers.iter().enumerate() {
        let known = [("kind", tier.kind.as_str(), kinds.as_slice()), ("policy", tier.policy.as_str(), POLICIES)];
        for (key, name, names) in known {
            if !names.contains(&name) {
                let reason = format!("no such {key} of tier; known are {}", names.join(", "));
                return Err(ConfigError::invalid(format!("tiers[{index}].{key}"), format!("{name:?}"), reason));
            }
        }
    }
    Ok(())
}

pub(crate) fn device_kind(config: &Config) -> DeviceKind {
    match config.device.kind {
        // The worker does not drive a GPU's streams and tiers yet: it would be slow there, and nobody has tested it.
        keepsake_config::DeviceKind::Auto => DeviceKind::Cpu,
        keepsake_config::DeviceKind::Cpu => DeviceKind::Cpu,
        keepsake_config::DeviceKind::Cuda => DeviceKind::Cuda,
    }
}

/// What `keepsake calibrate` measures: the configured model on the configured device and tiers.
pub fn calibration_subject(config: &Config) -> anyhow::Result<Subject> {
    check_names(config)?;
    let (device, model) = open_model(config)?;
    let layout = model.kv_layout(config.scheduler.chunk_tokens);
    config.check_device_pool(layout.chunk_bytes() as u64)?;
    Ok(subject(config, &model, &device, &key_scope(&model, &device, layout)))
}

fn subject(config: &Config, model: &Arc<Model>, device: &Device, scope: &KeyScope) -> Subject {
    Subject {
        model: Arc::clone(model),
        device: device.clone(),
        layout: scope.layout,
        layout_id: scope.layout_id(),
        max_context: max_context(config, model),
        tiers: config.tiers.clone(),
    }
}

/// What the core reckons with: measured now or earlier. Without a measurement it guesses, and serves all the same.
fn costs(config: &Config, subject: &Subject) -> Costs {
    let guessed = || Costs::unmeasured(config.tiers.len() - 1);
    if config.scheduler.calibrate == CalibrateMode::Off {
        return guessed();
    }
    match calibrate::obtain(subject, false) {
        Ok(obtained) => {
            let file = obtained.path.display();
            match obtained.origin {
                Origin::Measured => tracing::info!(seconds = obtained.calibration.seconds, %file, "calibrated"),
                Origin::File => tracing::info!(%file, "calibration read"),
            }
            obtained.calibration.costs
        }
        Err(error) => {
            tracing::warn!(error = format!("{error:#}"), "calibration failed: costs are guessed");
            guessed()
        }
    }
}

fn max_context(config: &Config, model: &Model) -> usize {
    config.model.max_context.unwrap_or(usize::MAX).min(model.hparams.max_context)
}

fn key_scope(model: &Model, device: &Device, layout: KvLayout) -> KeyScope {
    KeyScope {
        model: model.fingerprint(),
        layout,
        dtype: "f16".to_owned(),
        rank: 0,
        num_ranks: 1,
        backend: "cpu".to_owned(),
        numeric_version: device.numeric_version(),
    }
}

fn open_model(config: &Config) -> anyhow::Result<(Device, Arc<Model>)> {
    let device = Device::open(device_kind(config), config.device.threads)?;
    let model = Arc::new(load_model(config, &device)?);
    Ok((device, model))
}

fn load_model(config: &Config, device: &Device) -> anyhow::Result<Model> {
    let source = match &config.model.dummy {
        Some(shape) => ModelSource::Dummy(shape.clone()),
        None => ModelSource::detect(&crate::cli::resolve_model(&config.model)?)?,
    };
    let mut model = keepsake_model::load(&source, device)?;
    if let Some(path) = &config.model.chat_template {
        let refused = || format!("config: model.chat_template = {:?}", path.display().to_string());
        let template = std::fs::read_to_string(path).with_context(refused)?;
        model.chat = Arc::new(ChatTemplate::for_tokenizer(Some(&template), &model.tokenizer).with_context(refused)?);
    }
    Ok(model)
}

/// Token logs live beside the first rocks tier. Without one they live in a temporary folder, for as long as the process.
fn open_turn_store(config: &Config) -> anyhow::Result<(TurnStore, Option<TempDir>)> {
    let rocks = config.tiers.iter().enumerate().find(|(_, tier)| tier.kind == RocksOptions::KIND);
    if let Some((index, tier)) = rocks {
        let config = TurnStoreConfig::from_tier(tier, &format!("tiers[{index}]"))?;
        return Ok((TurnStore::open(config)?, None));
    }
    let folder = tempfile::Builder::new().prefix("keepsake-turns-").tempdir()?;
    let options = RocksOptions::default();
    let config = TurnStoreConfig {
        path: folder.path().join("turns"),
        capacity_bytes: options.turns_capacity.as_u64(),
        ttl: options.turn_ttl,
    };
    tracing::info!("no rocks tier: turns end with this process");
    Ok((TurnStore::open(config)?, Some(folder)))
}

fn open_tiers(
    config: &Config,
    scope: &KeyScope,
    device: (&Arc<KvPool>, &Arc<BlockPool>),
) -> anyhow::Result<Vec<Arc<dyn Tier>>> {
    let registry = Registry::default();
    let below = config.tiers.iter().enumerate().skip(1);
    below
        .map(|(index, tier)| {
            let context = TierContext {
                toml_path: format!("tiers[{index}]"),
                layout: scope.layout,
                layout_id: scope.layout_id(),
                device: Some((Arc::clone(device.0), Arc::clone(device.1))),
            };
            Ok(registry.open(tier, &context)?)
        })
        .collect()
}

fn core_config(config: &Config, max_context: usize, costs: Costs) -> CoreConfig {
    let scheduler = &config.scheduler;
    CoreConfig {
        chunk_tokens: scheduler.chunk_tokens,
        max_context,
        max_running: scheduler.max_running,
        max_waiting: config.server.max_queued,
        step_tokens: scheduler.step_tokens,
        reserve: scheduler.reserve,
        swap_out_below: scheduler.swap_out_below,
        steps_in_flight: scheduler.steps_in_flight,
        load_timeout: scheduler.load_timeout,
        moves_in_flight: MOVES_IN_FLIGHT,
        reuse: scheduler.reuse,
        protect_queued: scheduler.protect_queued,
        queue: match scheduler.queue {
            keepsake_config::QueueOrder::Arrival => QueueOrder::Arrival,
            keepsake_config::QueueOrder::CacheAware => QueueOrder::CacheAware { age_bound: scheduler.queue_age_bound },
        },
        device_policy: policy_choice(&config.tiers[0]),
        costs,
    }
}

fn policy_choice(tier: &keepsake_config::TierConfig) -> PolicyChoice {
    PolicyChoice { name: tier.policy.clone(), idle_cutoff: tier.idle_cutoff }
}

fn tier_specs(config: &Config, tiers: &[Arc<dyn Tier>], chunk_bytes: usize) -> Vec<TierSpec> {
    let spec = |(tier, section): (&Arc<dyn Tier>, &keepsake_config::TierConfig)| TierSpec {
        name: tier.name().to_owned(),
        capacity: (tier.usage().capacity_bytes / chunk_bytes as u64) as usize,
        durable: tier.capability().durable,
        policy: policy_choice(section),
    };
    tiers.iter().zip(&config.tiers[1..]).map(spec).collect()
}

/// Chunks of deleted turns that a kill may have brought back.
fn remove_doomed(store: &TurnStore, tiers: &[Arc<dyn Tier>]) -> anyhow::Result<()> {
    let doomed = store.doomed_chunks()?;
    if doomed.is_empty() {
        return Ok(());
    }
    for tier in tiers.iter().filter(|tier| tier.capability().durable) {
        for key in &doomed {
            tier.remove(key)?;
        }
        tier.flush()?;
    }
    tracing::info!(chunks = doomed.len(), "chunks of deleted turns removed");
    Ok(store.forget_doomed(&doomed)?)
}

/// Tells the core which chunks durable tiers kept, the least recently active first.
fn recover(core: &mut Scheduler, tiers: &[Arc<dyn Tier>]) -> anyhow::Result<()> {
    for (index, tier) in tiers.iter().enumerate() {
        let mut chunks = tier.recover()?;
        chunks.sort_by_key(|(_, meta)| (meta.last_activity_unix, meta.position));
        if !chunks.is_empty() {
            tracing::info!(tier = tier.name(), chunks = chunks.len(), "chunks recovered");
        }
        let known: Vec<_> = chunks
            .iter()
            .map(|(key, meta)| (*key, meta.position, Duration::from_secs(meta.last_activity_unix)))
            .collect();
        core.recover(TierIndex(index), &known);
    }
    Ok(())
}

async fn wait_for_signal() -> anyhow::Result<()> {
    use tokio::signal::unix::{signal, SignalKind};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// A panic in core, worker, tier, store or session ends the process: half of a server is worse than none, and a supervisor
/// starts it again. HTTP and blocking-pool threads only fail their request.
fn exit_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        let thread = std::thread::current();
        let name = thread.name().unwrap_or_default();
        let is_ours = name == gpu_worker::THREAD_NAME
            || name.starts_with(tier::THREAD_PREFIX)
            || name.starts_with(store::THREAD_PREFIX)
            || name.starts_with("mover-")
            || name.starts_with("turns-")
            || actix::Arbiter::try_current().is_some() && !name.starts_with("actix-server");
        if is_ours {
            tracing::error!(thread = name, "panic: the process ends");
            std::process::exit(PANIC_EXIT_CODE);
        }
    }));
}
