// What a dashboard file of rows and time series may hold, from Grafana's types. The test puts the JSON beside this file, as
// a literal of DashboardFile, so that unknown keys are errors as well.
import type { Dashboard, DataQuery, FieldConfig, GraphFieldConfig, Panel, RowPanel } from '@grafana/schema';
import type { Options } from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// In JSON the members of an enum of strings are plain strings.
type InJson<T> = T extends string
  ? `${T}`
  : T extends (infer Each)[]
    ? InJson<Each>[]
    : T extends object
      ? { [Name in keyof T]: InJson<T[Name]> }
      : T;

// The package has no types of queries to Prometheus: these are the fields that Grafana's data source reads.
interface Query extends DataQuery {
  expr: string;
  legendFormat: string;
}

interface TimeSeries extends Omit<Panel, 'type' | 'targets' | 'options' | 'fieldConfig'> {
  type: 'timeseries';
  targets: Query[];
  options: Options;
  fieldConfig: { defaults: Omit<FieldConfig, 'custom'> & { custom: GraphFieldConfig }; overrides: [] };
}

export type DashboardFile = InJson<Omit<Dashboard, 'panels'> & { panels: (RowPanel | TimeSeries)[] }>;
