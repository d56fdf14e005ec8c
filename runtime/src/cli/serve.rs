//! `keepsake serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use keepsake_config::{Config, Machine};

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Configuration file; without it, the defaults and the environment
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// GGUF file or Hugging Face folder to serve, instead of the configured model
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Address and port to listen on, instead of the configured one
    #[arg(long, value_name = "ADDRESS:PORT")]
    bind: Option<SocketAddr>,
}

pub(super) fn run(args: ServeArgs) -> anyhow::Result<()> {
    let mut config = Config::read(args.config.as_deref())?;
    if let Some(model) = args.model {
        config.model.path = Some(model);
        config.model.dummy = None;
    }
    if let Some(bind) = args.bind {
        config.server.bind = bind;
    }
    config.validate(&Machine::this())?;
    crate::telemetry::init(&config.telemetry)?;
    crate::app::serve(config)
}
